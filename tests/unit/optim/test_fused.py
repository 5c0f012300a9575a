"""The fused implementation: chosen where nobody says otherwise, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Task, Trainer
from trainkit.optim.clearing import clear_gradients
from trainkit.optim.fused import use_fused


def is_fused(optimizer: Optimizer, model: nn.Module) -> bool:
    """Let the choice be made and return it."""
    use_fused([optimizer], model)
    return bool(optimizer.param_groups[0].get("fused"))


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, Adagrad])
def test_it_makes_the_same_update(kind: type[Optimizer]) -> None:
    """What is chosen afterwards is what the constructor's fused=True makes, and what the loop over parameters makes but for
    rounding.
    """
    updated = []
    for options in ({"fused": True}, {}, {"foreach": False}):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = kind(model.parameters(), lr=0.1, **options)
        assert is_fused(optimizer, model) is ("foreach" not in options)
        for _ in range(3):
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            clear_gradients(optimizer)
        updated.append(model.weight.detach())
    assert torch.equal(updated[0], updated[1])
    torch.testing.assert_close(updated[1], updated[2])


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": False}, {"differentiable": True}])
def test_what_the_user_chose_stays(options: dict[str, bool]) -> None:
    """A choice at the constructor is one, also the choice against it."""
    model = nn.Linear(2, 2)
    assert not is_fused(SGD(model.parameters(), lr=0.1, **options), model)


class Own(SGD):
    """A user's own optimizer."""


def test_others_have_none() -> None:
    """Optimizers without it, subclasses, sparse gradients and complex parameters are left as they are."""
    model, rows = nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True)
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    assert not is_fused(RMSprop(model.parameters()), model)
    assert not is_fused(Own(model.parameters(), lr=0.1), model)
    assert not is_fused(SGD(rows.parameters(), lr=0.1), rows)
    assert not is_fused(SGD([parameter], lr=0.1), model)


class Line(Task):
    """A line; notes how its optimizer makes the update."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.options = options
        self.was: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.was.append(self.trainer.session.run.optimizers[0].param_groups[0]["fused"])
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1, momentum=0.9, **self.options)


def fit(task: Task, folder: Path, steps: int, **options: Any) -> Task:
    """Train for some steps."""
    data = DataLoader(TensorDataset(torch.ones(16, 3)), 4)
    trainer = Trainer(
        max_steps=steps,
        engine="single",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        run_dir=str(folder),
    )
    trainer.fit(task, data, **options)
    return task


def test_a_fit_takes_it(tmp_path: Path) -> None:
    """Left open it is fused; told otherwise it is not."""
    assert fit(Line(), tmp_path / "a", 1).was == [True]
    assert fit(Line(fused=False), tmp_path / "b", 1).was == [False]


def test_a_run_goes_on_as_it_began(tmp_path: Path) -> None:
    """A checkpoint of a run that was not fused goes on so, to the same bits as if it had not been interrupted."""
    whole = fit(Line(fused=False), tmp_path / "whole", 3)
    fit(Line(fused=False), tmp_path / "parts", 1)
    rest = fit(Line(), tmp_path / "parts", 3, ckpt_path="last")
    assert rest.was == [False, False]
    assert torch.equal(rest.model.weight, whole.model.weight)


class Noted(SGD):
    """Notes calls of its own zero_grad."""

    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


def test_gradients_are_cleared() -> None:
    """By hand, or by the optimizer's own zero_grad where it has one."""
    model = nn.Linear(2, 2)
    for optimizer in (SGD(model.parameters(), lr=0.1), Noted(model.parameters(), lr=0.1)):
        model(torch.ones(1, 2)).sum().backward()
        clear_gradients(optimizer)
        assert model.weight.grad is None
        assert model.bias.grad is None
    assert optimizer.calls == 1
