"""GradientMonitor: norms, by layer, of the gradient that the optimizer uses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.by_hand import Pair
from tests.helpers.logger_calls import Written
from tests.helpers.toy import Line, Net, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import GradientMonitor
from trainkit.errors import ConfigError


class Grads(Callback):
    """Records each step's gradients and weights by name."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        """Record them."""
        self.steps.append(
            {name: p.grad.clone() for name, p in task.named_parameters() if p.grad is not None}
        )
        self.weights.append({name: p.detach().clone() for name, p in task.named_parameters()})


def run(
    tmp_path: Path, task: Any, monitor: GradientMonitor, **settings: Any
) -> tuple[Written, Grads]:
    """Train; return the logged values, and the gradients."""
    written, grads = Written("grad_norm", "update_ratio"), Grads()
    settings = {"log_every_n_steps": 2, "assert_no_sync": True} | settings
    quiet(tmp_path, callbacks=[monitor, written, grads], **settings).fit(task, loader(16))
    return written, grads


@pytest.mark.parametrize("every", [1, 2])
def test_of_updates_by_hand_norms_are_logged_by_batch(tmp_path: Path, every: int) -> None:
    """Two optimizers count two steps a batch, and a log step is a batch's."""
    task, written = Pair(), Written("grad_norm")
    trainer = quiet(tmp_path, callbacks=[GradientMonitor(), written], log_every_n_steps=every)
    trainer.fit(task, loader(16))
    assert [step for step, _ in written.rows] == ([2, 4, 6, 8] if every == 1 else [4, 8])


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_norms_are_those_of_torch(tmp_path: Path, norm_type: float) -> None:
    """A group's norm is that of its gradients as one vector, the total that of all,
    and no step waits for it.
    """
    written, grads = run(tmp_path, Net(), GradientMonitor(norm_type))
    assert [step for step, _ in written.rows] == [2, 4]
    for step, values in written.rows:
        own = grads.steps[step - 1]
        layers = {
            f"grad_norm/model.{i}": [g for n, g in own.items() if n.startswith(f"model.{i}.")]
            for i in (0, 1, 4)
        }
        wanted = {"grad_norm/total": list(own.values())} | layers
        assert values.keys() == wanted.keys()
        for name, tensors in wanted.items():
            assert values[name] == pytest.approx(
                float(torch.cat([t.reshape(-1) for t in tensors]).norm(norm_type)), rel=1e-5
            )


def test_groups_are_the_first_parts_of_names(tmp_path: Path) -> None:
    """A depth of 1 puts the whole model into one group."""
    written, _ = run(tmp_path, Net(), GradientMonitor(group_depth=1))
    assert list(written.rows[0][1]) == ["grad_norm/total", "grad_norm/model"]


def test_the_norm_is_that_before_clipping(tmp_path: Path) -> None:
    """Else each norm of a run that is clipped would be the bound."""
    free, _ = run(tmp_path / "a", Line(lr=0.0), GradientMonitor())
    written, _ = run(tmp_path / "b", Line(lr=0.0), GradientMonitor(), gradient_clip_val=0.01)
    assert written.of("grad_norm/total") == free.of("grad_norm/total")


def test_the_ratio_is_of_update_and_weights(tmp_path: Path) -> None:
    """With plain SGD the update is the rate times the gradient."""
    written, grads = run(
        tmp_path, Line(lr=0.1), GradientMonitor(update_ratio=True), assert_no_sync=False
    )
    step, values = written.rows[0]
    of = {
        name: torch.cat([t.reshape(-1) for t in own[step - 1].values()]).norm()
        for name, own in (("g", grads.steps), ("w", grads.weights))
    }
    assert values["update_ratio/total"] == pytest.approx(float(0.1 * of["g"] / of["w"]), rel=1e-4)


def test_weights_without_numbers_are_left_out(tmp_path: Path) -> None:
    """A parameter without elements has no largest value."""
    task = Line()
    task.nothing = nn.Parameter(torch.empty(0))  # type: ignore[assignment]
    written, _ = run(
        tmp_path, task, GradientMonitor(math.inf, update_ratio=True), assert_no_sync=False
    )
    assert list(written.rows[0][1]) == [
        "grad_norm/total",
        "grad_norm/model",
        "update_ratio/total",
        "update_ratio/model",
    ]


def test_watching_changes_nothing(tmp_path: Path) -> None:
    """The weights at the end are those of a run without it, bit for bit."""
    watched, plain = Net(), Net()
    run(
        tmp_path, watched, GradientMonitor(every_n_steps=1, update_ratio=True), assert_no_sync=False
    )
    quiet(tmp_path).fit(plain, loader(16))
    assert torch.equal(weights(watched), weights(plain))


def test_sparse_and_missing_gradients_are_taken(tmp_path: Path) -> None:
    """A row that occurs twice in a sparse gradient counts as its sum;
    frozen and unused weights are left out.
    """

    class Rows(Line):
        def make_model(self) -> nn.Module:
            return nn.Embedding(5, 2, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(torch.tensor([1, 1, 3])).sum()

    task = Rows()
    task.frozen = nn.Parameter(torch.ones(2), requires_grad=False)  # type: ignore[assignment]
    task.unused = nn.Linear(2, 2)  # type: ignore[assignment]
    written, _ = run(tmp_path, task, GradientMonitor(every_n_steps=1))
    assert written.rows[0] == (
        1,
        {"grad_norm/total": pytest.approx(10**0.5), "grad_norm/model": pytest.approx(10**0.5)},
    )


def test_illegal_arguments_are_refused() -> None:
    """A norm of order 0 is refused."""
    with pytest.raises(
        ConfigError, match=r"callbacks\.gradients\.norm_type is 0; it must be a number above 0"
    ):
        GradientMonitor(norm_type=0)
