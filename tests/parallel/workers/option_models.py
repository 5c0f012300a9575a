"""The models and data of options.py, which test_options.py computes with by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def net() -> nn.Sequential:
    """Two layers in float64, always the same."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch() -> Tensor:
    """Rows for up to 3 ranks."""
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


class Words(nn.Module):
    """Two sparse embeddings, one without a module, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.table = nn.Embedding(12, 4, sparse=True)
        self.bags = nn.EmbeddingBag(7, 4, mode="sum", sparse=True)
        self.unused = nn.Embedding(5, 4, sparse=True)
        self.raw = nn.Parameter(torch.randn(6, 4))
        self.head = nn.Linear(4, 1)
        self.double()

    def forward(self, words: Tensor, bags: bool) -> Tensor:
        held = self.table(words).mean(1) + functional.embedding(
            words[:, 0] % 6, self.raw, sparse=True
        )
        if bags:
            held = held + self.bags(words % 7)
        return self.head(held.tanh()).square().mean()


WORDS = torch.tensor([[1, 1, 2], [3, 1, 0], [2, 2, 2], [9, 8, 1], [4, 4, 11], [5, 1, 1]])


class Norms(nn.Module):
    """Three BatchNorm layers, and a branch that only some ranks use."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.conv = nn.Conv2d(2, 4, 3)
        self.first = nn.BatchNorm2d(4, momentum=momentum)
        self.branch = nn.Linear(4, 4)
        self.second = nn.BatchNorm1d(4, momentum=momentum, affine=False)
        self.third = nn.BatchNorm1d(4, track_running_stats=False)
        self.double()

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        held = self.first(self.conv(x)).tanh().mean((2, 3))
        if branch.any():
            held = held + self.branch(held) * branch.unsqueeze(1)
        return self.third(self.second(held) * 2 + 1).sin()


def pictures() -> Tensor:
    """A global batch with a mean far from 0."""
    drawn = torch.randn(
        6, 2, 5, 5, generator=torch.Generator().manual_seed(17), dtype=torch.float64
    )
    return drawn + 1000 * torch.arange(6).reshape(6, 1, 1, 1)
