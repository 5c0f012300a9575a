"""LearningRateMonitor: Lightning's names, and the rates that the next step uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.logger_calls import Written
from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import LearningRateMonitor, ModelCheckpoint
from trainkit.errors import ConfigError


class Two(Line):
    """Two layers; the function that creates the optimizers is a parameter."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def make_model(self) -> nn.Module:
        """Return the model."""
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

    def configure_optimizers(self) -> Any:
        """Return the parameter's optimizers."""
        return self.make(self)


def run(tmp_path: Path, task: Any, monitor: LearningRateMonitor, **settings: Any) -> Written:
    """Train; return the logged values."""
    written = Written("lr-", "schedule")
    quiet(tmp_path, callbacks=[monitor, written], log_every_n_steps=2, **settings).fit(
        task, loader(16)
    )
    return written


def test_one_group_is_named_after_its_optimizer(tmp_path: Path) -> None:
    """Without warm-up and schedule the rate is logged at each epoch's start."""
    written = run(tmp_path, Line(lr=0.1), LearningRateMonitor(), max_epochs=2)
    assert written.rows == [(0, {"lr-SGD": 0.1}), (4, {"lr-SGD": 0.1})]


def test_warm_up_is_written_by_steps(tmp_path: Path) -> None:
    """If rates change within an epoch they are logged with the step's values,
    and are those of its update.
    """
    written = run(tmp_path, Line(lr=0.1), LearningRateMonitor(), lr_warmup_steps=4)
    assert written.rows == [
        (2, {"lr-SGD": pytest.approx(0.05)}),
        (4, {"lr-SGD": pytest.approx(0.1)}),
    ]


@pytest.mark.parametrize("settings", [{}, {"lr_warmup_steps": 4}])
def test_other_callbacks_find_the_rates(tmp_path: Path, settings: Any) -> None:
    """As in Lightning, by epochs and by steps: a checkpoint can be named after one."""
    monitor = LearningRateMonitor()
    by_rate = ModelCheckpoint(filename="{lr-SGD:.1f}")
    trainer = quiet(
        tmp_path,
        callbacks=[monitor, by_rate],
        enable_checkpointing=True,
        log_every_n_steps=2,
        **settings,
    )
    trainer.fit(Line(lr=0.1), loader(16))
    assert trainer.callback_metrics["lr-SGD"] == pytest.approx(0.1)
    assert "lr-SGD=0.1" in {path.name for path in (tmp_path / "checkpoints").iterdir()}


def groups(task: Any) -> list[dict[str, Any]]:
    """Return two groups, the second with its own rate."""
    return [
        {"params": task.model[0].parameters()},
        {"params": task.model[1].parameters(), "lr": 0.5},
    ]


def test_groups_are_numbered_as_lightning_does(tmp_path: Path) -> None:
    """Several groups are pg1, pg2; momentum and weight decay follow the name."""
    task = Two(
        lambda task: torch.optim.AdamW(groups(task), lr=0.1, betas=(0.8, 0.9), weight_decay=0.02)
    )
    written = run(
        tmp_path, task, LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    )
    names = [f"lr-AdamW/pg{i}{end}" for i in (1, 2) for end in ("", "-momentum", "-weight_decay")]
    assert written.rows[0] == (2, dict(zip(names, [0.1, 0.8, 0.02, 0.5, 0.8, 0.02], strict=True)))


def test_names_of_groups_and_schedules_are_kept(tmp_path: Path) -> None:
    """A group's "name" and that of the lr_scheduler dict appear in the logged name."""

    def make(task: Any) -> Any:
        optimizer = torch.optim.SGD(
            [group | {"name": f"g{i}"} for i, group in enumerate(groups(task))], lr=0.1
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
                "name": "schedule",
            },
        }

    written = run(tmp_path, Two(make), LearningRateMonitor(), max_epochs=2)
    assert [list(values) for _, values in written.rows] == [["schedule/g0", "schedule/g1"]] * 2
    assert written.rows[1][1]["schedule/g1"] == pytest.approx(0.05)


def test_a_second_optimizer_of_a_class_is_numbered(tmp_path: Path) -> None:
    """Two optimizers of one class are lr-SGD and lr-SGD-1."""
    task = Two(lambda task: [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in task.model])
    assert list(run(tmp_path, task, LearningRateMonitor()).rows[0][1]) == ["lr-SGD", "lr-SGD-1"]


def test_equal_names_are_refused(tmp_path: Path) -> None:
    """Two groups with one name are refused: one would hide the other."""
    task = Two(
        lambda task: torch.optim.SGD([group | {"name": "same"} for group in groups(task)], lr=0.1)
    )
    with pytest.raises(ConfigError, match="two parameter groups are named 'lr-SGD/same'"):
        run(tmp_path, task, LearningRateMonitor())


def test_an_illegal_interval_is_refused() -> None:
    """The interval is one of Lightning's."""
    with pytest.raises(ConfigError, match=r"callbacks\.learning_rate\.logging_interval is 'steps'"):
        LearningRateMonitor("steps")  # type: ignore[arg-type]
