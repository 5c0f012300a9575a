"""Lines about on_train_epoch_end: an epoch that it is left out of, a scheduler that it comes after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.helpers.toy import Line, loader, quiet
from trainkit.api.callback import Callback
from trainkit.errors import TaskError

_CUT = "on_train_epoch_end of Ending was not called"


class Ending(Line):
    """Logs at an epoch's end; a plateau may monitor that value."""

    def __init__(self, monitor: str = "mine", **config: Any) -> None:
        super().__init__()
        self.config = {"monitor": monitor, **config}

    def configure_optimizers(self) -> Any:
        """Return SGD and a plateau."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        plateau = ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, **self.config}}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log a value of the epoch too."""
        self.log("in_time", 1.0, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        """Log."""
        self.log("mine", 1.0)


def printed(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    task: Line,
    *callbacks: Callback,
    **settings: Any,
) -> str:
    """Return what a fit of two steps an epoch prints, on one line."""
    settings = {"max_epochs": 4} | settings
    quiet(folder, callbacks=list(callbacks), **settings).fit(task, loader(8), loader(4))
    return " ".join(capsys.readouterr().out.split())


def test_an_epoch_that_a_limit_cuts_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the class of what it was not called of."""
    out = printed(tmp_path, capsys, Ending("in_time"), max_steps=3)
    assert out.count(f"{_CUT} for epoch 1") == 1


def test_an_epoch_that_a_stop_cuts_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A callback of the user's has the hook, and asks for the stop."""

    class Mine(Callback):
        def on_train_batch_end(
            self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            trainer.should_stop = True

        def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
            pass

    assert "on_train_epoch_end of Mine was not" in printed(tmp_path, capsys, Line(), Mine())


@pytest.mark.parametrize("steps", [2, 4])
def test_whole_epochs_are_not_named(
    steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit at an epoch's end cuts none; trainkit's own callbacks are no news either."""
    assert _CUT not in printed(tmp_path, capsys, Ending("in_time"), max_steps=steps)
    assert "was not called" not in printed(tmp_path, capsys, Line(), max_steps=3)


def test_an_error_names_no_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fit did not end by a limit."""

    class Broken(Ending):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise ValueError("broken")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="broken"):
        printed(tmp_path, capsys, Broken("in_time"))
    assert "was not called" not in capsys.readouterr().out


def test_a_plateau_that_never_moves_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With strict=False, which misses its value in silence."""
    out = printed(tmp_path, capsys, Ending(strict=False))
    assert out.count("ReduceLROnPlateau monitors 'mine' and has not moved") == 1


@pytest.mark.parametrize(
    "task", [Ending("in_time", strict=False), Ending("val/loss", strict=False)]
)
def test_a_plateau_that_moves_is_not_named(
    task: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its value is logged in training_step or in validation, though not each epoch."""
    out = printed(tmp_path, capsys, task, check_val_every_n_epoch=2)
    assert "has not moved" not in out


def test_a_plateau_that_the_task_moves_is_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand, in any epoch."""

    class ByHand(Ending):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(Line.training_step(self, batch, batch_idx))
            optimizer.step()

    assert "has not moved" not in printed(tmp_path, capsys, ByHand(strict=False))


def test_a_strict_one_ends_in_an_error_that_says_why(tmp_path: Path) -> None:
    """After the first epoch."""
    with pytest.raises(TaskError, match=r"'mine'.*scheduler moves before on_train_epoch_end"):
        quiet(tmp_path, max_epochs=2).fit(Ending(), loader(8))
