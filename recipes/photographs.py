"""Photographs: a file to a tensor, and the statistics of ImageNet's."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from trainkit.errors import ConfigError, DataError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_JPEG = b"\xff\xd8"  # the first bytes of its files


def of_channels(
    key: str, given: Sequence[float] | None, default: tuple[float, ...]
) -> tuple[float, ...]:
    """Return a number for each of red, green and blue: a setting's, or the default.

    Raises:
        ConfigError: there are not three.
    """
    if given is None:
        return default
    if len(given) != len(default):
        raise ConfigError(
            f"{key} is {list(given)}; it must be three numbers, of red, green and blue from 0 to 1,"
            f" or null for ImageNet's: {list(default)}."
        )
    return tuple(given)


def load_image(path: str) -> Tensor:
    """Decode a file to RGB, uint8 [3, height, width]; an error names the file.

    JPEGs are decoded to a tensor, whose transforms cost a third less than those of PIL's images
    (benchmarks/data.py); PIL decodes other formats, and files that torchvision cannot decode.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise _undecodable(path, error) from error
    return decode_image(data, lambda: path)


def decode_image(data: bytes, name: Callable[[], str]) -> Tensor:
    """Decode a file's content, as `load_image`; `name` returns the file's name for an error."""
    try:
        if data.startswith(_JPEG):
            # PIL decodes more formats, and has better errors
            with contextlib.suppress(RuntimeError):
                return decode_jpeg(
                    torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB
                )
        with Image.open(io.BytesIO(data)) as image:
            return v2.functional.pil_to_tensor(image.convert("RGB"))
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
        raise _undecodable(name(), error) from error


def _undecodable(name: str, error: Exception) -> DataError:
    reason = "of no known format" if isinstance(error, UnidentifiedImageError) else error
    return DataError(
        f"{name} cannot be decoded as an image ({reason}). Replace or remove the file."
    )
