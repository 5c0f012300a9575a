"""A recommender: ratings by matrix factorization (Koren et al. 2009), with sparse embeddings, on
generated ratings.

Each step uses a few rows of large tables, so their gradients are sparse: ranks exchange only the
used rows, and SparseAdam updates only these.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from trainkit.arguments import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from trainkit.optim import decay_groups


class Recommender(trainkit.Task):
    """rating = a linear function of (user x item) + user's bias + item's bias, under the mean
    squared error.

    Args:
        num_users: rows of the users' table.
        num_items: rows of the items' table.
        optimizer: makes the optimizer of the dense parameters.
        sparse_lr: rate of SparseAdam, which updates the tables.
        width: numbers of an embedding.
    """

    batch_shape = "pairs [B, 2] and ratings [B]"

    def __init__(
        self,
        num_users: PositiveInt,
        num_items: PositiveInt,
        optimizer: Callable[..., torch.optim.Optimizer],
        sparse_lr: PositiveFloat = 0.01,
        width: PositiveInt = 16,
    ) -> None:
        super().__init__()
        self.users = nn.Embedding(num_users, width + 1, sparse=True)  # the last number is the bias
        self.items = nn.Embedding(num_items, width + 1, sparse=True)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=width**-0.25 / 2)
        self.head = nn.Linear(width, 1)
        self.optimizer, self.sparse_lr = optimizer, sparse_lr

    def forward(self, pairs: Tensor) -> Tensor:
        """Return ratings [B] of pairs (user, item), int64 [B, 2]."""
        user_BD, item_BD = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        rating_B = self.head(user_BD[:, :-1] * item_BD[:, :-1]).squeeze(1)
        return rating_B + user_BD[:, -1] + item_BD[:, -1]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self(batch[0]), batch[1])
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", functional.mse_loss(self(batch[0]), batch[1]), prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test/loss", functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        tables = [self.users.weight, self.items.weight]
        return [
            torch.optim.SparseAdam(tables, lr=self.sparse_lr),
            self.optimizer(decay_groups(self.head, no_weight_decay=[])),
        ]


class Ratings(trainkit.DataModule):
    """Ratings of hidden tastes and some noise; few items are rated often, most seldom. A tenth is
    for validation.

    Args:
        batch_size: the microbatch of one rank.
        num_users: number of users.
        num_items: number of items.
        num_ratings: pairs, some of them twice.
        tastes: hidden features of a user and an item.
        noise: standard deviation of the noise; the part of the tastes has 1.
        num_workers: loader processes; the ratings are in memory, so none is fastest.
    """

    batch_shape = "pairs [B, 2] and ratings [B]"

    def __init__(
        self,
        batch_size: PositiveInt = 256,
        num_users: PositiveInt = 2000,
        num_items: PositiveInt = 1000,
        num_ratings: PositiveInt = 100_000,
        tastes: PositiveInt = 4,
        noise: NonNegativeFloat = 0.1,
        num_workers: NonNegativeInt = 0,
    ) -> None:
        self.batch_size, self.num_workers = batch_size, num_workers
        self.sizes = num_users, num_items, num_ratings
        self.tastes, self.noise = tastes, noise

    def setup(self, stage: str) -> None:
        num_users, num_items, num_ratings = self.sizes
        generator = torch.Generator().manual_seed(0)
        user_UT = torch.randn(num_users, self.tastes, generator=generator)
        item_IT = torch.randn(num_items, self.tastes, generator=generator)
        popularity_I = 1 / torch.arange(1, num_items + 1).sqrt()
        users = torch.randint(num_users, (num_ratings,), generator=generator)
        items = torch.multinomial(popularity_I, num_ratings, replacement=True, generator=generator)
        ratings = (user_UT[users] * item_IT[items]).sum(1) / self.tastes**0.5
        ratings += self.noise * torch.randn(num_ratings, generator=generator)
        pairs, held_out = torch.stack([users, items], 1), num_ratings // 10
        self.train = TensorDataset(pairs[held_out:], ratings[held_out:])
        self.val = TensorDataset(pairs[:held_out], ratings[:held_out])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        return self.val_dataloader()
