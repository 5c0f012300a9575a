"""Handwritten digits: 1,797 real images shipped with the recipe (digits.npz), so nothing is
downloaded.

They are the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak,
1998, UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, CC BY 4.0), as scikit-learn
ships them: 8 x 8 pixels of 0 to 16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from recipes.augment import Augment, as_given
from trainkit.arguments import NonNegativeInt, PositiveInt


class Digits(trainkit.DataModule):
    """Every fifth image is for validation (360), the others for training (1,437).

    Args:
        batch_size: the microbatch of one rank.
        image_size: the images are upsampled to this many pixels square, in three equal channels.
        num_classes: 10; for the model's config to refer to.
        num_workers: loader processes; the images are in memory, so none is fastest.
        augment: how training images vary: policy, erasing and repeats. There are no crops, and
            digits are not flipped.
    """

    batch_shape = "images [B, 3, H, W] and labels [B]"

    def __init__(
        self,
        batch_size: PositiveInt = 16,
        image_size: PositiveInt = 32,
        num_classes: PositiveInt = 10,
        num_workers: NonNegativeInt = 0,
        augment: Augment | None = None,
    ) -> None:
        if num_classes != 10:
            raise trainkit.TrainkitError(f"data.num_classes is {num_classes}; there are 10 digits.")
        self.batch_size, self.image_size, self.num_workers = batch_size, image_size, num_workers
        self.augment = as_given("data.augment", augment) or Augment()

    def setup(self, stage: str) -> None:
        with np.load(Path(__file__).with_name("digits.npz")) as held:
            images = torch.from_numpy(held["images"]).float().unsqueeze(1) / 16
            labels = torch.from_numpy(held["labels"]).long()
        images = functional.interpolate(
            images, size=self.image_size, mode="bilinear", align_corners=False
        )
        images = ((images - 0.5) / 0.5).expand(-1, 3, -1, -1)
        held_out = torch.arange(len(labels)) % 5 == 0
        self.train = self.augment.of_tensors(TensorDataset(images[~held_out], labels[~held_out]))
        self.val = TensorDataset(images[held_out], labels[held_out])

    def describe_input(self) -> dict[str, Any]:
        half = (0.5, 0.5, 0.5)
        return {
            "image": {
                "resize": self.image_size,
                "crop": self.image_size,
                "mean": half,
                "std": half,
            },
            "classes": [str(digit) for digit in range(10)],
        }

    def train_dataloader(self) -> DataLoader:
        return self.augment.loader(self.train, self.batch_size, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        return self.val_dataloader()
