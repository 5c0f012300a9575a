"""Progress: lines where there is no terminal, a bar where there is one."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.toy import Line, loader, quiet
from trainkit.callbacks.progress import ProgressBar


class Logs(Line):
    """Logs for the bar."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log a value for the bar."""
        self.log("train/score", 0.25, prog_bar=True)
        return super().training_step(batch, batch_idx)


class Clock:
    """Stands for the module time: each look is so many seconds later."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = 0.0, step_s

    def monotonic(self) -> float:
        """Return the time."""
        self.now += self.step_s
        return self.now


def test_each_epoch_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal each epoch prints a line with its values, its rate and its time, and no more."""
    quiet(tmp_path, max_epochs=2, enable_progress_bar=True).fit(Line(), loader(23), loader(4))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for epoch, line in enumerate(lines, 1):
        assert re.fullmatch(rf"epoch {epoch}/2  val/loss [\d.e-]+  [\d,]+ samples/s  \d+\.\d s", line)


def test_a_long_epoch_is_seen_to_live(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal a line comes every half minute, with the values logged for the bar."""
    monkeypatch.setattr("trainkit.callbacks.progress.time", Clock(step_s=16.0))
    quiet(tmp_path, max_steps=5, log_every_n_steps=1, enable_progress_bar=True).fit(Logs(), loader(23))
    steps = [line for line in capsys.readouterr().out.splitlines() if "step" in line]
    assert [line.split("  ")[1] for line in steps] == ["step 2/6", "step 4/6"]
    assert all("train/score 0.25" in line for line in steps)


def test_a_stop_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that was asked to stop ends with the reason."""

    class Stops(Line):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.request_stop("enough")

    quiet(tmp_path, enable_progress_bar=True).fit(Stops(), loader(23))
    assert capsys.readouterr().out.endswith("Stopped: enough.\n")


@pytest.mark.parametrize("fails", [False, True])
def test_the_bar_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """On a terminal a bar counts the steps, and is gone when the run has ended, well or not."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=150)
    monkeypatch.setattr("trainkit.callbacks.progress.console_of", lambda: console)

    class Fails(Logs):
        def on_train_epoch_end(self) -> None:
            if fails:
                raise KeyError("broken")

    trainer = quiet(tmp_path, enable_progress_bar=True, log_every_n_steps=1)
    try:
        trainer.fit(Fails(), loader(23), loader(4))
    except KeyError:
        assert fails
    (bar,) = [c for c in trainer.callbacks if isinstance(c, ProgressBar)]
    assert bar._bar is None
    assert "epoch 1/1" in screen.getvalue()
    assert screen.getvalue().count("\x1b[?25l") == screen.getvalue().count("\x1b[?25h") == 1  # the cursor is back


def test_a_finished_epoch_may_be_gone_on_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that goes on at the last step of an epoch has nothing to show for it, and does not fail."""
    quiet(tmp_path, max_steps=5, enable_checkpointing=True).fit(Line(), loader(23))
    quiet(tmp_path, max_steps=6, enable_progress_bar=True).fit(Line(), loader(23), ckpt_path="last")
    assert capsys.readouterr().out.startswith("epoch 1")
