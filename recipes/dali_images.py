"""Image folders decoded by NVIDIA DALI (pip install nvidia-dali-cuda130): data=imagefolder
data.decode=dali.

    worker: Encoded (a file's bytes; its crop and flip, drawn as recipes/imagefolder.py draws them)
    -> on the CPU: DaliDecoder
    rank:   -> on a GPU: DaliDecoder, of a batch of bytes

DALI draws nothing: crop and flip come from (seed, epoch, sample), so order, augmentation and resume
are as exact as with torchvision. Its decoder and its resize round otherwise, so pixels differ a
little.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from recipes.photographs import MEAN, STD, load_image
from trainkit.errors import ConfigError, DataError

Statistics = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True)
class Encoded:
    """An image to be decoded.

    Attributes:
        path: its file.
        content: its bytes, uint8.
        window: top, left, height and width of the crop.
        mirror: 1 to flip it.
        label: its class.
    """

    path: str
    content: Any
    window: tuple[int, int, int, int]
    mirror: int
    label: int


def refuse_without_dali(device: str) -> None:
    """Raise if DALI or the GPU for it is missing.

    Raises:
        ConfigError: what is missing.
    """
    if (
        importlib.util.find_spec("nvidia") is None
        or importlib.util.find_spec("nvidia.dali") is None
    ):
        raise ConfigError(
            "data.decode is dali, but DALI is not installed: pip install nvidia-dali-cuda130 (or"
            " -cuda120, as the driver has it). Or leave it out: data.decode=torchvision."
        )
    if device == "gpu" and not torch.cuda.is_available():
        raise ConfigError(
            "data.decode_device is gpu, but this process sees no GPU (torch.cuda.is_available() is"
            " false). Set data.decode_device=cpu."
        )


class EncodedImages(Dataset[Encoded]):
    """Files with their crop and flip: of training drawn, of validation none (the whole image; see
    DaliDecoder).

    Args:
        samples: pairs of file and label.
        crops: whether crops and flips are drawn.
    """

    def __init__(self, samples: Sequence[tuple[str, int]], crops: bool) -> None:
        self.samples, self.crop = list(samples), v2.RandomResizedCrop(1) if crops else None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Encoded:
        path, label = self.samples[index]
        try:
            content = np.fromfile(path, np.uint8)
            with Image.open(io.BytesIO(content.data)) as image:  # the header alone
                width, height = image.size
        except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
            raise DataError(
                f"{path} cannot be decoded as an image ({error}). Replace or remove the file."
            ) from error
        if self.crop is None:
            return Encoded(path, content, (0, 0, height, width), 0, label)
        drawn = self.crop.make_params([torch.empty((3, height, width), device="meta")])
        window = (drawn["top"], drawn["left"], drawn["height"], drawn["width"])
        return Encoded(path, content, window, int(torch.rand(1) < 0.5), label)


class DaliDecoder:
    """Makes images [B, 3, size, size], normalized, and labels [B] of encoded ones.

    Args:
        size: of the images, in pixels.
        shorter: the shorter side before the centre crop, for validation; None stretches the crop to
            `size`.
        batch_size: the most images at a time.
        statistics: mean and standard deviation of the channels, which normalize.
        gpu: whether to decode on the GPU, in the rank's own process.
    """

    def __init__(
        self,
        size: int,
        shorter: int | None,
        batch_size: int,
        statistics: Statistics = (MEAN, STD),
        gpu: bool = False,
    ) -> None:
        self.size, self.shorter, self.batch_size, self.gpu = size, shorter, batch_size, gpu
        self.mean, self.std = statistics
        self._pipeline: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pipeline": None}

    def __call__(self, batch: list[Encoded]) -> tuple[Tensor, Tensor]:
        """Decode a batch.

        Raises:
            DataError: DALI cannot decode one of its files.
        """
        if self._pipeline is None:
            self._pipeline = self._built()
        pipe = self._pipeline
        pipe.feed_input("content", [one.content for one in batch])
        pipe.feed_input("anchor", [np.array(one.window[:2], np.int32) for one in batch])
        pipe.feed_input("shape", [np.array(one.window[2:], np.int32) for one in batch])
        pipe.feed_input("mirror", [np.array(one.mirror, np.int32) for one in batch])
        try:
            (output,) = pipe.run()
        except RuntimeError as error:
            self._pipeline = None  # it cannot be used after an error
            for one in batch:
                load_image(one.path)  # names the file, if others cannot decode it either
            listed = ", ".join(one.path for one in batch[:3]) + ", ..." * (len(batch) > 3)
            reason = str(error).strip().splitlines()[-1]
            raise DataError(
                f"DALI cannot decode one of {listed}: {reason}. Train with data.decode=torchvision."
            ) from error
        images = (
            torch.from_dlpack(output.as_tensor()).clone()
            if self.gpu
            else torch.from_numpy(output.as_array().copy())
        )
        return images, torch.tensor([one.label for one in batch], device=images.device)

    def _built(self) -> Any:
        dali, fn, types = (
            importlib.import_module(f"nvidia.dali{part}") for part in ("", ".fn", ".types")
        )
        device_id = torch.cuda.current_device() if self.gpu else None
        plain = {"prefetch_queue_depth": 1, "exec_async": False, "exec_pipelined": False}
        pipe = dali.Pipeline(
            self.batch_size, num_threads=2 if self.gpu else 1, device_id=device_id, **plain
        )
        with pipe:
            content, anchor, shape, mirror = (
                fn.external_source(name=key) for key in ("content", "anchor", "shape", "mirror")
            )
            device = "mixed" if self.gpu else "cpu"
            window = {
                "normalized_anchor": False,
                "normalized_shape": False,
                "axis_names": "HW",
                "adjust_orientation": False,
            }
            images = fn.decoders.image_slice(
                content, anchor, shape, device=device, output_type=types.RGB, **window
            )
            if self.shorter is None:
                images = fn.resize(
                    images, size=[self.size, self.size], interp_type=types.INTERP_TRIANGULAR
                )
            else:
                images = fn.resize(
                    images, resize_shorter=self.shorter, interp_type=types.INTERP_TRIANGULAR
                )
            numbers = {
                "mean": [255 * x for x in self.mean],
                "std": [255 * x for x in self.std],
                "crop": [self.size, self.size],
            }
            images = fn.crop_mirror_normalize(
                images, mirror=mirror, dtype=types.FLOAT, output_layout="CHW", **numbers
            )
            pipe.set_outputs(images)
        pipe.build()
        return pipe


class LateDecoder:
    """Collates what the rank decodes on its GPU, while it moves the batch there.
    Arguments: see DaliDecoder.
    """

    def __init__(
        self,
        size: int,
        shorter: int | None,
        batch_size: int,
        statistics: Statistics = (MEAN, STD),
    ) -> None:
        self.arguments = size, shorter, batch_size, statistics

    def __call__(self, batch: list[Encoded]) -> EncodedBatch:
        """Return the batch as it is."""
        return EncodedBatch(batch, self.arguments)


@dataclass(frozen=True)
class EncodedBatch:
    """A batch that becomes images on its way to the device."""

    images: list[Encoded]
    arguments: tuple[int, int | None, int, Statistics]

    def to(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return images and labels on the device."""
        images, labels = _decoder_of(*self.arguments)(self.images)
        return images.to(device), labels.to(device)


@functools.cache
def _decoder_of(
    size: int, shorter: int | None, batch_size: int, statistics: Statistics
) -> DaliDecoder:
    return DaliDecoder(size, shorter, batch_size, statistics, gpu=torch.cuda.is_available())
