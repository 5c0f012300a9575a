"""trainer.activation_checkpointing: the same bits, fewer tensors kept for backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.toy import Line, loader, quiet, weights
from trainkit.errors import ConfigError


class Block(nn.Module):
    """A layer with dropout; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout, self.forwards = nn.Linear(3, 3), nn.Dropout(0.5), 0

    def forward(self, x: Tensor) -> Tensor:
        """Return as many features."""
        self.forwards += 1
        return x + self.dropout(torch.tanh(self.layer(x)))


class Deep(Line):
    """Two blocks and a last layer."""

    def make_model(self) -> nn.Module:
        """Return them."""
        torch.manual_seed(2)
        return nn.Sequential(Block(), Block(), nn.Linear(3, 1))


def train(tmp_path: Path, **settings: Any) -> Deep:
    """Train some steps, and validate."""
    task = Deep()
    quiet(tmp_path, max_epochs=2, **settings).fit(task, loader(), loader())
    return task


@pytest.mark.parametrize("blocks", [True, ["Block"], ["model.0", "model.2"]])
def test_weights_are_the_same_bits(blocks: Any, tmp_path: Path) -> None:
    """Dropout is drawn again as it was."""
    assert torch.equal(
        weights(train(tmp_path / "a", activation_checkpointing=blocks)),
        weights(train(tmp_path / "b")),
    )


def test_blocks_run_again_in_backward_only(tmp_path: Path) -> None:
    """One more forward for each of training, none for validation;
    afterwards the Task is as it was.
    """
    plain, again = train(tmp_path / "a"), train(tmp_path / "b", activation_checkpointing=True)
    steps = 2 * 6
    assert again.model[0].forwards == plain.model[0].forwards + steps
    assert "forward" not in vars(again.model[0]) and list(again.state_dict()) == list(
        plain.state_dict()
    )


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (["Blocks"], "trainer.activation_checkpointing names 'Blocks', which is no module"),
        (True, "Line has no repeated blocks"),
    ],
)
def test_blocks_that_are_not_there_are_an_error(blocks: Any, words: str, tmp_path: Path) -> None:
    """The message says what to name."""
    with pytest.raises(ConfigError, match=words):
        quiet(tmp_path, activation_checkpointing=blocks).fit(Line(), loader())


class Normed(Block):
    """A block with a batch norm, whose statistics are of all forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many features."""
        return self.norm(super().forward(x))


def test_batch_norm_counts_a_forward_once(tmp_path: Path) -> None:
    """Its statistics are those of a run that computes nothing again, and stay the same tensors."""

    class Task(Deep):
        def make_model(self) -> nn.Module:
            torch.manual_seed(2)
            return nn.Sequential(Normed(), Normed(), nn.Linear(3, 1))

    def states(blocks: bool) -> dict[str, Tensor]:
        task = Task()
        means = [block.norm.running_mean for block in task.model[:2]]
        trainer = quiet(tmp_path / str(blocks), activation_checkpointing=blocks, max_steps=3)
        trainer.fit(task, loader())
        assert all(
            block.norm.running_mean is mean for block, mean in zip(task.model, means, strict=False)
        )
        return task.state_dict()

    plain, again = states(False), states(True)
    assert plain["model.0.norm.num_batches_tracked"] == 3
    for name, value in plain.items():
        assert torch.equal(again[name], value), name


@pytest.mark.parametrize("second", ["retain_graph", "create_graph"])
def test_a_graph_with_batch_norm_has_a_second_backward(second: str, tmp_path: Path) -> None:
    """Each backward computes the blocks again: of two losses, or of a penalty on gradients."""

    class Task(Deep):
        automatic_optimization = False

        def make_model(self) -> nn.Module:
            torch.manual_seed(2)
            return nn.Sequential(Normed(), Normed(), nn.Linear(3, 1))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, y = self.optimizers(), self.model(batch[0])
            optimizer.zero_grad()
            if second == "retain_graph":
                self.manual_backward(y.sum(), retain_graph=True)
                self.manual_backward(y.square().sum())
            else:
                grads = torch.autograd.grad(y.sum(), list(self.parameters()), create_graph=True)
                self.manual_backward(torch.stack([g.square().sum() for g in grads]).sum())
            optimizer.step()

    def states(blocks: bool) -> dict[str, Tensor]:
        task = Task()
        trainer = quiet(tmp_path / str(blocks), activation_checkpointing=blocks, max_steps=3)
        trainer.fit(task, loader())
        return task.state_dict()

    plain, again = states(False), states(True)
    assert plain["model.0.norm.num_batches_tracked"] == 3
    for name, value in plain.items():
        assert torch.equal(again[name], value), name
