"""Adafactor: torch's, on whole weights; tests/parallel has those that ranks hold parts of."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.helpers.toy import Net, loader, quiet, weights
from trainkit.optim import Adafactor, decay_groups


class Made(Net):
    """A task under Adafactor."""

    def configure_optimizers(self) -> Any:
        """Return it."""
        return Adafactor(decay_groups(self), 0.05)


def test_steps_are_torchs() -> None:
    """Bit for bit, a closure's loss too."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    other = copy.deepcopy(model)
    optimizers = [
        kind(one.parameters(), 0.05, weight_decay=0.1)
        for kind, one in ((Adafactor, model), (torch.optim.Adafactor, other))
    ]
    for _ in range(3):
        losses = []
        for one, optimizer in zip((model, other), optimizers, strict=True):
            optimizer.zero_grad()
            loss = one(torch.ones(2, 3)).square().sum()
            loss.backward()
            losses.append(optimizer.step(lambda loss=loss: loss))
        assert torch.equal(*losses)
    assert torch.equal(weights(model), weights(other))


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Stopped inside an epoch and resumed, the weights are those of the run that never stopped."""
    tasks = [Made() for _ in range(3)]
    quiet(tmp_path / "whole", max_steps=9).fit(tasks[0], loader(23))
    quiet(tmp_path / "parts", max_steps=4, enable_checkpointing=True).fit(tasks[1], loader(23))
    quiet(tmp_path / "parts", max_steps=9).fit(tasks[2], loader(23), ckpt_path="last")
    assert torch.equal(weights(tasks[2]), weights(tasks[0]))
