"""Images of noise, for measurements: no disk, no decoding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import trainkit
from recipes.augment import Augment, as_given
from trainkit.arguments import NonNegativeInt, PositiveInt

_POOL = 64  # different images; more would only cost memory


class NoiseImages(Dataset):
    """`num_samples` pairs of image [3, image_size, image_size] and label,
    repeating a small pool.
    """

    def __init__(self, num_samples: int, image_size: int, num_classes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(_POOL, 3, image_size, image_size, generator=generator)
        self.labels = torch.randint(num_classes, (_POOL,), generator=generator)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index % _POOL], self.labels[index % _POOL]


class Synthetic(trainkit.DataModule):
    """Noise for training, and a tenth of it for validation.

    Args:
        batch_size: the microbatch of one rank.
        image_size: in pixels.
        num_classes: number of different labels.
        num_samples: of an epoch.
        num_workers: loader processes.
        augment: how training images vary: policy, erasing and repeats, to measure their cost.
    """

    batch_shape = "images [B, 3, H, W] and labels [B]"

    def __init__(
        self,
        batch_size: PositiveInt = 32,
        image_size: PositiveInt = 224,
        num_classes: PositiveInt = 1000,
        num_samples: PositiveInt = 1024,
        num_workers: NonNegativeInt = 0,
        augment: Augment | None = None,
    ) -> None:
        self.batch_size, self.image_size, self.num_workers = batch_size, image_size, num_workers
        self.augment = as_given("data.augment", augment) or Augment()
        self.train = self.augment.of_tensors(NoiseImages(num_samples, image_size, num_classes))
        self.val = NoiseImages(max(1, num_samples // 10), image_size, num_classes)

    def train_dataloader(self) -> DataLoader:
        return self.augment.loader(self.train, self.batch_size, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        return self.val_dataloader()
