"""JPEGs to measure with, as large as ImageNet's: 500 x 375 pixels, about 75 kB."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 4
_SIZE = (500, 375)


def make_jpegs(root: Path, different: int, links: int = 1) -> None:
    """Write root/train/<class>/*.jpg, and a few below root/val.

    Args:
        root: a folder.
        different: images for training, over all classes.
        links: names that each of them has: an epoch is so many times as long.
    """
    draw = np.random.default_rng(0)
    for part, number, names in (("train", different, links), ("val", 2 * CLASSES, 1)):
        for i in range(number):
            folder = root / part / f"class{i % CLASSES}"
            folder.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(draw.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize(
                _SIZE, Image.Resampling.BICUBIC
            )
            # smooth alone, it would decode too fast
            noisy = np.asarray(image) + draw.normal(0, 9, (_SIZE[1], _SIZE[0], 3))
            first = folder / f"{i}.jpg"
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(first, quality=90)
            for link in range(1, names):
                (folder / f"{i}-{link}.jpg").hardlink_to(first)
