"""A Task's own lr_scheduler_step, and schedulers that are not torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toy import Line, loader, quiet
from trainkit import Callback
from trainkit.errors import TaskError
from trainkit.optim.batch_plan import BatchPlan
from trainkit.optim.forms import read_optimizers
from trainkit.run.reused import ReusedParts


class Halving:
    """A scheduler of a user's own: half the rate after each epoch, not below `lowest`."""

    def __init__(self, optimizer: torch.optim.Optimizer, lowest: float) -> None:
        self.optimizer = optimizer
        self.lowest = lowest
        self.epoch = 0
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]

    def step(self, epoch: int) -> None:
        """Set the rates of an epoch."""
        self.epoch = epoch
        for group in self.optimizer.param_groups:
            group["lr"] = max(self.lowest, group["initial_lr"] / 2**epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and numbers of which it makes no use."""
        return {"epoch": self.epoch, "lowest": self.lowest, "more": torch.arange(2.0) + self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.epoch, self.lowest = state["epoch"], state["lowest"]


class Own(Line):
    """A Task that steps it."""

    def __init__(self, lowest: float = 0.02, lr: float = 0.1) -> None:
        super().__init__(lr=lr)
        self.lowest = lowest
        self.metrics: list[Any] = []

    def configure_optimizers(self) -> Any:
        """Return SGD and the scheduler."""
        optimizer = torch.optim.SGD(self.parameters(), **self.sgd)
        return [optimizer], [Halving(optimizer, self.lowest)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """See Task."""
        self.metrics.append(metric)
        scheduler.step(epoch=self.current_epoch + 1)


class Rates(Callback):
    """The rate of each epoch's first step."""

    def __init__(self) -> None:
        self.read: list[float] = []

    def on_train_epoch_start(self, trainer: Any, task: Any) -> None:
        """Read it."""
        self.read.append(trainer.optimizers[0].param_groups[0]["lr"])


def rates_of(run_dir: Path, task: Line, *, ckpt_path: Any = None, **settings: Any) -> list[float]:
    """Train; return the rates, and leave a checkpoint."""
    rates = Rates()
    trainer = quiet(run_dir, callbacks=[rates], **settings)
    trainer.fit(task, loader(16), ckpt_path=ckpt_path)
    trainer.save_checkpoint(run_dir / "end.pt")
    return rates.read


def test_a_scheduler_of_ones_own_is_scaled_as_torchs(tmp_path: Path) -> None:
    """It sees and sets the user's rates; those of the optimizer are multiplied by the factor."""
    task = Own()
    assert rates_of(tmp_path / "1", task, max_epochs=4) == pytest.approx([0.1, 0.05, 0.025, 0.02])
    assert task.metrics == [None] * 4
    scaled = {"lr_scaling": "linear", "lr_reference_batch_size": 2, "lr_warmup_epochs": 0}
    read = rates_of(tmp_path / "2", Own(), max_epochs=4, **scaled)
    assert read == pytest.approx([0.2, 0.1, 0.05, 0.04])


@pytest.mark.parametrize("settings", [{}, {"lr": 0.05}, {"lowest": 0.03}], ids=str)
def test_it_resumes(tmp_path: Path, settings: dict[str, float]) -> None:
    """At the rate where it was, with its state; and on another curve if the user changes it."""
    settings = {"lowest": 0.001, **settings}
    whole = rates_of(tmp_path / "whole", Own(**settings), max_epochs=4)
    rates_of(tmp_path / "part", Own(lowest=0.001), max_epochs=2)
    end = tmp_path / "part" / "end.pt"
    rest = rates_of(tmp_path / "rest", Own(**settings), max_epochs=4, ckpt_path=end)
    assert rest[1:] == pytest.approx(whole[3:])
    assert rest[0] == pytest.approx(0.025 if settings["lowest"] == 0.03 else whole[2])


def test_an_error_in_it_leaves_the_scaled_rate(tmp_path: Path) -> None:
    """Which a checkpoint of the error then has."""

    class Fails(Own):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            """Fail at the second epoch's end."""
            super().lr_scheduler_step(scheduler, metric)
            if self.current_epoch == 1:
                raise ValueError("a mistake of the user")

    task = Fails()
    scaled = {"lr_scaling": "linear", "lr_reference_batch_size": 2, "lr_warmup_epochs": 0}
    trainer = quiet(tmp_path, max_epochs=3, **scaled)
    kept: list[Any] = []
    task.on_fit_start = lambda: kept.append(task.optimizers().optimizer)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="a mistake"):
        trainer.fit(task, loader(16))
    assert kept[0].param_groups[0]["lr"] == pytest.approx(2 * 0.025)


def test_it_is_given_the_monitored_value(tmp_path: Path) -> None:
    """Of a scheduler that was returned with reduce_on_plateau, under any class."""

    class Monitors(Own):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            """Log the loss."""
            loss = super().training_step(batch, batch_idx)
            self.log("own", loss, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            """Return it with the value's name."""
            (optimizer,), (scheduler,) = super().configure_optimizers()
            more = {"monitor": "own", "reduce_on_plateau": True}
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **more}}

    task = Monitors()
    rates_of(tmp_path, task, max_epochs=2)
    assert [type(value) for value in task.metrics] == [float, float]


def test_a_later_attempt_makes_another() -> None:
    """Its state need not be all that it has, and ranks that join have a new one."""
    task, parts = Own(), ReusedParts()
    plan = BatchPlan(4, 1, 1, "none", None, 0)

    def make() -> Any:
        return read_optimizers(task.configure_optimizers(), True, task.lr_scheduler_step)

    first, second = parts.optimizers(task, plan, make), parts.optimizers(task, plan, make)
    assert first[1][0].scheduler is not second[1][0].scheduler


def test_what_a_run_needs_of_it(tmp_path: Path) -> None:
    """Its optimizer, and its state; without lr_scheduler_step it must be torch's."""

    class Stateless(Halving):
        load_state_dict = property()  # type: ignore[assignment]

    class Lacks(Own):
        def configure_optimizers(self) -> Any:
            """Return one without its state."""
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [Stateless(optimizer, 0.0)]

    class Unstepped(Own):
        lr_scheduler_step = Line.lr_scheduler_step

    with pytest.raises(TaskError, match="of type Stateless, which has no load_state_dict"):
        rates_of(tmp_path / "lacks", Lacks(), max_epochs=1)
    with pytest.raises(TaskError, match=r"must define lr_scheduler_step\(self"):
        rates_of(tmp_path / "unstepped", Unstepped(), max_epochs=1)
