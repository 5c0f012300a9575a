"""Folders of small images, whose colour is their class."""

from __future__ import annotations

from pathlib import Path

import torch
from torchvision.io import write_jpeg


def write_pictures(
    root: Path, train: int = 32, val: int = 8, classes: int = 4, size: int = 24
) -> Path:
    """Write train/<class>/*.jpg and val/<class>/*.jpg, and return the folder."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", train), ("val", val)):
        for i in range(count):
            path = root / part / f"class{i % classes}" / f"image.{i:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = torch.randint(0, 80, (3, size, size), generator=generator, dtype=torch.uint8)
            pixels[i % classes % 3] += 100
            write_jpeg(pixels, str(path))
    return root
