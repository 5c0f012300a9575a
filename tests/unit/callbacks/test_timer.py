"""Timer and trainer.max_time: training ends at its time limit, at the same step on all ranks."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.toy import Line, Recorder, loader, quiet
from trainkit.callbacks import ModelCheckpoint, Timer
from trainkit.errors import ConfigError


class Clock(Recorder):
    """Advances time by a second per step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now = 100.0
        fake = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("trainkit.engine.coordinator.time", fake)
        monkeypatch.setattr("trainkit.callbacks.timer.time", fake)

    def on_train_step_start(self, trainer: Any, task: Any) -> None:
        """Advance by a second."""
        self.now += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that moves with the steps."""
    return Clock(monkeypatch)


def test_training_ends_when_the_time_is_over(tmp_path: Path, clock: Clock) -> None:
    """The clock is checked after each step; the agreed time is that of the step before."""
    timer = Timer(3)
    trainer = quiet(tmp_path, max_epochs=9, callbacks=[clock, timer])
    trainer.fit(Line(), loader(8))
    assert trainer.global_step == 4
    assert (
        trainer.state.stop_reason
        == "the time limit is reached: 3.0 s of training, the limit is 3.0 s"
    )
    assert (timer.start_time(), timer.end_time(), timer.time_elapsed(), timer.time_remaining()) == (
        100,
        104,
        4,
        0,
    )


def test_what_was_before_training_does_not_count(tmp_path: Path, clock: Clock) -> None:
    """Launchers and data may take minutes to start: only training counts."""

    class SlowStart(Line):
        def setup(self, stage: str) -> None:
            clock.now += 1000

    trainer = quiet(tmp_path, max_epochs=1, callbacks=[clock, Timer(30)])
    trainer.fit(SlowStart(), loader(20))
    assert trainer.global_step == 5


def test_min_epochs_comes_first(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in Lightning: the limit is said, and training continues until then."""
    trainer = quiet(tmp_path, max_epochs=9, min_epochs=3, callbacks=[clock, Timer(3)])
    trainer.fit(Line(), loader(8))
    assert trainer.current_epoch == 3
    out = capsys.readouterr().out
    assert out.count("training continues until trainer.min_epochs=3") == 1


def test_by_epochs_it_is_looked_at_at_their_ends(tmp_path: Path, clock: Clock) -> None:
    """With interval "epoch" a started epoch is finished."""
    trainer = quiet(
        tmp_path, max_epochs=9, callbacks=[clock, Timer({"seconds": 3}, interval="epoch")]
    )
    trainer.fit(Line(), loader(20))
    assert (trainer.global_step, trainer.current_epoch) == (5, 1)


@pytest.mark.parametrize("limit", ["00:00:00:05", timedelta(seconds=5), {"seconds": 5}, 5])
def test_max_time_is_a_limit_like_the_others(tmp_path: Path, clock: Clock, limit: Any) -> None:
    """trainer.max_time needs neither epochs nor steps, and takes Lightning's forms."""
    trainer = quiet(tmp_path, max_epochs=None, max_time=limit, callbacks=[clock])
    trainer.fit(Line(), loader(8))
    assert trainer.global_step == 6


def test_a_checkpoint_is_there_and_time_continues_over_a_restart(
    tmp_path: Path, clock: Clock
) -> None:
    """The run ends with a checkpoint;
    with a longer limit it resumes from there, and the used time counts.
    """

    def fit(limit: int) -> Any:
        trainer = quiet(
            tmp_path, max_epochs=None, max_time=limit, callbacks=[clock, ModelCheckpoint()]
        )
        trainer.fit(Line(), loader(8), ckpt_path="auto")
        return trainer

    assert fit(3).global_step == 4
    assert (tmp_path / "checkpoints" / "last").is_dir()
    assert fit(3).global_step == 4
    second = fit(8)
    assert second.global_step == 10
    timer = next(c for c in second.callbacks if isinstance(c, Timer))
    assert timer.state_dict() == {"time_elapsed": 8.0}
    assert timer.time_elapsed() == 9.0


def test_stages_are_measured_apart(tmp_path: Path) -> None:
    """Validation and test have their own times; before they begin there is none."""
    timer = Timer()
    trainer = quiet(tmp_path, callbacks=timer)
    assert (timer.start_time("validate"), timer.time_elapsed("test"), timer.time_remaining()) == (
        None,
        0.0,
        None,
    )
    trainer.fit(Line(), loader(8), loader(8))
    trainer.test(Line(), loader(8))
    assert 0 < timer.time_elapsed("validate") < timer.time_elapsed("train")
    assert timer.time_elapsed("test") > 0


def test_what_is_wrong_is_refused() -> None:
    """An illegal duration, an unknown stage,
    and a second illegal limit are refused with what is legal.
    """
    with pytest.raises(
        ConfigError,
        match=r"callbacks\.timer\.duration is 'soon'; it must be a number of seconds above 0",
    ):
        Timer("soon")
    with pytest.raises(
        ConfigError, match="the stage is 'fit'; it must be one of train, validate, test"
    ):
        Timer().time_elapsed("fit")
    with pytest.raises(ConfigError, match=r"trainer\.max_time is \{'years': 1\}; it must be"):
        quiet(".", max_time={"years": 1})
