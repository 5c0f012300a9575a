"""Folders of images in ImageNet's layout: root/train/<class>/*.jpg and root/val/<class>/*.jpg."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder as TorchvisionImageFolder
from torchvision.transforms import v2

import trainkit
from recipes import dali_images
from recipes.augment import Augment, as_given
from recipes.photographs import MEAN, STD, load_image, of_channels
from trainkit.arguments import ExistingFolder, NonNegativeInt, PositiveFloat, PositiveInt
from trainkit.errors import ConfigError, DataError
from trainkit.launch.environment import read_launcher

_OF_DALI = (
    "data     decode=dali: crops and flips are those of decode=torchvision, a function of (seed,"
    " epoch, sample), and so exact on resume; pixels differ a little, as its decoder and resize"
    " round otherwise. A file that it cannot decode ends the run."
)


class ImageFolder(trainkit.DataModule):
    """Training: random resized crop and flip (He et al. 2016), or as `augment` says. Validation:
    resize, centre crop.

    Args:
        root: the folder that holds train/ and val/.
        batch_size: the microbatch of one rank.
        num_classes: the number of class folders.
        image_size: of the crops, in pixels.
        num_workers: processes of each rank that decode; None takes the rank's share of the cores.
        augment: how training images vary; None for crop and flip only.
        decode: the library that decodes, crops and resizes: torchvision, or NVIDIA's dali, where it
            is installed.
        decode_device: of dali: cpu, in the loader's workers; or gpu, in the rank.
        mean: of red, green and blue, from 0 to 1, which normalizes an image; None for ImageNet's.
        std: of the same.
    """

    batch_shape = "images [B, 3, H, W] and labels [B]"

    def __init__(
        self,
        root: ExistingFolder,
        batch_size: PositiveInt = 32,
        num_classes: PositiveInt = 1000,
        image_size: PositiveInt = 224,
        num_workers: NonNegativeInt | None = None,
        augment: Augment | None = None,
        decode: Literal["torchvision", "dali"] = "torchvision",
        decode_device: Literal["cpu", "gpu"] = "cpu",
        mean: list[float] | None = None,
        std: list[PositiveFloat] | None = None,
    ) -> None:
        self.root, self.batch_size, self.num_classes = Path(root), batch_size, num_classes
        self.image_size, self.num_workers = image_size, num_workers
        self.augment = as_given("data.augment", augment) or Augment()
        self.decode, self.decode_device = decode, decode_device
        self.mean = of_channels("data.mean", mean, MEAN)
        self.std = of_channels("data.std", std, STD)
        if decode == "torchvision" and decode_device == "gpu":
            raise ConfigError(
                "data.decode_device is gpu, which is of data.decode=dali; torchvision decodes on"
                " the CPU."
            )
        if decode == "dali":
            dali_images.refuse_without_dali(decode_device)
            if self.augment.policy or self.augment.erasing:
                raise ConfigError(
                    "data.decode is dali, which crops and flips; data.augment has a policy or"
                    " random_erasing, which need data.decode=torchvision."
                )

    @property
    def train_image_size(self) -> int:
        """Return the pixels of a training crop."""
        return self.augment.train_image_size or self.image_size

    def setup(self, stage: str) -> None:
        tail = [
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(self.mean, self.std, inplace=True),
        ]
        if stage == "fit":
            if self.decode == "dali" and read_launcher().is_main:
                print(_OF_DALI, flush=True)
            self.train = self._read("train", self.augment.of_photographs(self.image_size, tail))
        self.val = self._read(
            "val", v2.Compose([*self.augment.of_validation(self.image_size), *tail])
        )

    def describe_input(self) -> dict[str, Any]:
        resize = self.augment.resize_of(self.image_size)
        return {
            "image": {
                "resize": resize,
                "crop": self.image_size,
                "mean": self.mean,
                "std": self.std,
            },
            "classes": self.val.classes,
        }

    def train_dataloader(self) -> DataLoader:
        if self.decode == "dali":
            return self._decoded_by_dali(self.train, True)
        return self.augment.loader(self.train, self.batch_size, **self._loading())

    def val_dataloader(self) -> DataLoader:
        if self.decode == "dali":
            return self._decoded_by_dali(self.val, False)
        return DataLoader(self.val, self.batch_size, **self._loading())

    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def _decoded_by_dali(self, images: TorchvisionImageFolder, training: bool) -> DataLoader:
        """Return a loader of images that DALI decodes."""
        crops = training and self.augment.crop_and_flip
        size = (self.augment.train_image_size or self.image_size) if crops else self.image_size
        shorter = None if crops else self.augment.resize_of(self.image_size)
        decoder = (
            dali_images.LateDecoder if self.decode_device == "gpu" else dali_images.DaliDecoder
        )(size, shorter, self.batch_size, (self.mean, self.std))
        options = {**self._loading(), "collate_fn": decoder}
        encoded = dali_images.EncodedImages(images.samples, crops)
        return (
            self.augment.loader(encoded, self.batch_size, **options)
            if training
            else DataLoader(encoded, self.batch_size, **options)
        )

    def _read(self, part: str, transform: v2.Transform) -> TorchvisionImageFolder:
        folder = self.root / part
        if not folder.is_dir():
            raise DataError(
                f"data.root is '{self.root}', which has no folder {part}/; it must hold train/ and"
                f" val/, and each a folder for each class.{_if_texts(self.root)}"
            )
        try:
            dataset = TorchvisionImageFolder(str(folder), transform, loader=load_image)
        except FileNotFoundError as error:
            # torchvision's words: no class folders, or which of them are empty
            raise DataError(
                f"{folder}: {str(error).rstrip('.')}. Each class needs one image at least."
                f"{_if_texts(folder)}"
            ) from error
        self._check(part, dataset.classes)
        return dataset

    def _check(self, part: str, classes: list[str]) -> None:
        """Raise if a class folder of train/ or val/ is not in the other (labels would differ),
        or their number is another.
        """
        other = "val" if part == "train" else "train"
        others = {path.name for path in (self.root / other).glob("*") if path.is_dir()}
        for here, there, missing in (
            (part, other, others - {*classes}),
            (other, part, others and {*classes} - others),
        ):
            if missing:
                names = f"{', '.join(sorted(missing)[:5])}{', ...' * (len(missing) > 5)}"
                raise DataError(
                    f"{self.root / here} has no folder for the classes that {there}/ has: {names}."
                    " Both need the same folders: add it, with an image at least, or remove it"
                    " there."
                )
        if len(classes) != self.num_classes:
            shown = f"{', '.join(classes[:5])}{', ...' * (len(classes) > 5)}"
            raise ConfigError(
                f"data.num_classes is {self.num_classes}, but {self.root / part} has {len(classes)}"
                f" class folders ({shown}). If none is missing, set"
                f" data.num_classes={len(classes)}."
            )

    def _loading(self) -> dict[str, Any]:
        workers = self.num_workers
        if workers is None:
            workers = max(1, len(os.sched_getaffinity(0)) // read_launcher().local_size)
        return {
            "num_workers": workers,
            "persistent_workers": workers > 0,
            "pin_memory": torch.cuda.is_available(),
        }


def _if_texts(folder: Path) -> str:
    """Return a sentence for a folder that holds texts, else ""."""
    suffixes = (".txt", ".jsonl", ".md")
    texts = (path for path in folder.rglob("*") if path.suffix in suffixes)
    if (first := next(texts, None)) is None:
        return ""
    return (
        f" It holds texts ({first.name}): conf=gpt data.root={folder} trains on bytes;"
        " conf=hf_causal_lm and conf=sft fine-tune a model of transformers (docs/language_models.md)."
    )
