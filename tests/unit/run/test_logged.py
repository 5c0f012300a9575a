"""What a fit's end says of values that were never logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.loggers import CSVLogger


class Logs(Line):
    """Logs its loss as it is asked to."""

    def __init__(self, **how: bool) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch[0]).square().mean()
        self.log("mine", loss, **self.how)
        return loss


def said(folder: Path, capsys: pytest.CaptureFixture[str], every: int, **how: bool) -> str:
    """Return what a fit of three steps prints."""
    quiet(folder, logger=CSVLogger(), log_every_n_steps=every).fit(Logs(**how), loader(12))
    return " ".join(capsys.readouterr().out.split())


def test_a_fit_shorter_than_the_interval_says_what_it_did_not_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names, interval, length and what to set, in one line."""
    text = said(tmp_path, capsys, 4)
    assert (
        "No step logged mine: the fit ended at step 3, and trainer.log_every_n_steps is 4" in text
    )
    assert "trainer.log_every_n_steps=1" in text and "on_epoch=True" in text


class Alternates(Line):
    """Logs one value each step, and another in each second."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch[0]).square().mean()
        self.log("always", loss)
        if batch_idx % 2 == 0:
            self.log("seldom", loss)
        return loss


def test_a_value_whose_steps_are_never_logged_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a generator's loss beside a critic that is trained more often."""
    quiet(tmp_path, logger=CSVLogger(), log_every_n_steps=2).fit(Alternates(), loader(16))
    text = " ".join(capsys.readouterr().out.split())
    assert "No step logged seldom: the fit ended at step 4" in text
    assert "which none of the steps with such a value is a multiple of" in text


@pytest.mark.parametrize(
    ("every", "how"),
    [
        (3, {}),
        (4, {"on_step": False, "on_epoch": True}),
        (4, {"on_step": True, "on_epoch": True}),
    ],
)
def test_a_fit_that_logs_is_silent(
    every: int, how: dict[str, bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a step is logged, or the values have epoch means, nothing is said."""
    assert "No step logged" not in said(tmp_path, capsys, every, **how)


def test_a_fit_without_a_logger_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written in any case, as in a fast_dev_run."""
    quiet(tmp_path, fast_dev_run=True, logger=CSVLogger()).fit(Logs(), loader(12))
    assert "No step logged" not in capsys.readouterr().out
