"""A Task's own optimizer_zero_grad, and the arguments of all hooks around an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toy import Line, loader, quiet
from trainkit.errors import TaskError


def by_hand(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
    """Drop each gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def nothing(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
    """Leave them."""


def to_zero(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
    """Leave zeros."""
    optimizer.zero_grad(set_to_none=False)


def stepping(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
    """Make an update."""
    optimizer.step()


def test_gradients_may_be_dropped_one_by_one(tmp_path: Path) -> None:
    """Without optimizer.zero_grad."""
    ends = []
    for members in ({}, {"optimizer_zero_grad": by_hand}):
        task = type("Own", (Line,), members)()
        quiet(tmp_path, max_epochs=2).fit(task, loader(16))
        ends.append([p.detach().clone() for p in task.parameters()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (nothing, "Own.optimizer_zero_grad leaves the gradients of the step before"),
        (to_zero, r"calls zero_grad\(set_to_none=False\)"),
        (stepping, "Own.optimizer_zero_grad steps the optimizer"),
    ],
)
def test_what_would_change_the_next_step_is_refused(tmp_path: Path, method: Any, says: str) -> None:
    """With what to do."""
    task = type("Own", (Line,), {"optimizer_zero_grad": method})()
    with pytest.raises(TaskError, match=says):
        quiet(tmp_path, max_epochs=1).fit(task, loader(16))


@pytest.mark.parametrize(
    ("name", "method", "says"),
    [
        (
            "lr_scheduler_step",
            lambda self, scheduler, optimizer_idx, metric: None,
            r"\(scheduler, optimizer_idx, metric\) is called with \(scheduler, metric\)",
        ),
        (
            "configure_gradient_clipping",
            lambda self, optimizer, optimizer_idx, gradient_clip_val, gradient_clip_algorithm: None,
            r"is called with \(optimizer, gradient_clip_val=\.\.\., gradient_clip_algorithm=",
        ),
        (
            "optimizer_step",
            lambda self, epoch, batch_idx, optimizer, optimizer_idx, closure, on_tpu: None,
            r"is called with \(epoch, batch_idx, optimizer, optimizer_closure\)",
        ),
        ("optimizer_zero_grad", lambda self, epoch: None, r"\(epoch\) is called with"),
    ],
)
def test_lightning_1s_arguments_are_refused_at_the_start(
    tmp_path: Path, name: str, method: Any, says: str
) -> None:
    """Before a step."""
    task = type("Own", (Line,), {name: method})()
    with pytest.raises(TaskError, match=f"Own.{name}.*{says}.*since Lightning 2"):
        quiet(tmp_path, max_epochs=1).fit(task, loader(16))
    quiet(tmp_path).validate(task, loader(16), verbose=False)  # where none is called
