"""A Task with experts for the workers: both ways to balance them, and experts that few tokens reach.

A sample of 6 numbers is 3 tokens of 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import trainkit
from recipes.experts import ExpertLoad, Routers, even_loss

EXPERTS, TOKENS = 5, 3


class Router(nn.Module):
    """Two experts for each token, by softmax and a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, width))
        self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, weights and numbers of experts, as transformers' do."""
        logits_NE = functional.linear(x_ND, self.weight)
        scores_NE = logits_NE.softmax(-1)
        chosen_N2 = (scores_NE + self.e_score_correction_bias).topk(2, -1).indices
        return logits_NE, scores_NE.gather(1, chosen_N2), chosen_N2


class Block(nn.Module):
    """Experts, and a wide layer for all tokens, added to its input.

    Args:
        width: features.
        skips: whether an expert without tokens is not called, and so has no gradient.
    """

    def __init__(self, width: int, skips: bool) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), Router(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.skips = skips

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return as many features."""
        x_ND = self.norm(x_BTD).flatten(0, 1)
        _, weights_N2, chosen_N2 = self.gate(x_ND)
        y_ND = self.down(functional.gelu(self.up(x_ND)))
        for number, expert in enumerate(self.experts):
            place_M, which_M = torch.where(chosen_N2 == number)
            if len(place_M) or not self.skips:
                own_MD = expert(x_ND[place_M]).tanh() * weights_N2[place_M, which_M, None]
                y_ND = y_ND.index_add(0, place_M, own_MD)
        return x_BTD + y_ND.view_as(x_BTD)


class Mixed(trainkit.Task):
    """Three blocks with experts.

    Args:
        make: makes the optimizer from the parameters.
        width: features.
        seed: of the weights.
        skips: see Block.
    """

    def __init__(
        self, make: Callable[[Any], Any], width: int = 8, seed: int = 3, skips: bool = True
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.make = make
        self.first, self.last = nn.Linear(2, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width, skips) for _ in range(3))
        self.load = ExpertLoad(rate=0.05)
        self.load.routers = self.routers = Routers(self)
        self.counts: list[list[list[int]]] = []  # of each microbatch, layer and expert
        self.gathered: list[bool] = []

    def configure_callbacks(self) -> Any:
        """Return what counts, and moves biases."""
        return self.load

    def parallelize(self, mesh: Any) -> dict[str, str]:
        """Split the layers that all tokens go through."""
        return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def forward(self, x_B6: Tensor) -> Tensor:
        """Return one number a sample."""
        x_BTD = self.first(x_B6.unflatten(1, (TOKENS, -1)))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.last(x_BTD).mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean squared error and the balance."""
        with self.routers.watched() as routed:
            loss = (self(batch[0]) - batch[1]).pow(2).mean()
        self.load.look(routed)
        self.counts.append(self.load.seen_LE.tolist())  # type: ignore[union-attr]
        return loss + 0.1 * even_loss(routed, len(batch[0])).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the error."""
        self.log("val/loss", (self(batch[0]) - batch[1]).pow(2).mean())

    def configure_optimizers(self) -> Any:
        """Return the scenario's."""
        return self.make(self.parameters())
