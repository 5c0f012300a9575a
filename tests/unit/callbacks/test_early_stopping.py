"""EarlyStopping: ends a run when a value no longer improves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import EarlyStopping, ModelCheckpoint
from trainkit.errors import ConfigError
from trainkit.run.parts import CallbacksPart


class Scored(Line):
    """Logs given scores, one per validation."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.scores = iter(scores)

    def on_validation_start(self) -> None:
        """Take the next score."""
        self.score = next(self.scores)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log it."""
        self.log("val/score", self.score)


def run(
    tmp_path: Path, stopping: EarlyStopping, scores: list[float], **settings: Any
) -> tuple[int, str | None]:
    """Train with these scores; return the number of epochs and the stop reason."""
    trainer = quiet(tmp_path, max_epochs=20, num_sanity_val_steps=0, callbacks=stopping, **settings)
    trainer.fit(Scored(scores), loader(4), loader(4))
    return trainer.current_epoch, trainer.state.stop_reason


@pytest.mark.parametrize(
    ("settings", "scores", "epochs", "best"),
    [
        ({"patience": 2}, [5, 4, 4, 4, 1], 4, "4"),
        ({"patience": 1}, [5, 4, 6, 1], 3, "4"),
        ({"patience": 2, "mode": "max"}, [1, 2, 1, 3, 3, 2, 9], 6, "3"),
        ({"patience": 2, "min_delta": 1.0}, [5, 4.5, 4.1, 1], 3, "5"),
        ({"patience": 2, "min_delta": 1.0}, [5, 3.9, 3.5, 2.8, 2.7, 2.6, 0], 6, "2.8"),
    ],
)
def test_a_run_ends_after_its_patience(
    tmp_path: Path, settings: Any, scores: Any, epochs: int, best: str
) -> None:
    """The run ends after `patience` epochs without an improvement of more than `min_delta`."""
    trained, reason = run(tmp_path, EarlyStopping("val/score", **settings), scores)
    assert trained == epochs
    assert reason == f"val/score has not improved on {best} for {settings['patience']} epochs"


@pytest.mark.parametrize(("mode", "scores"), [("min", [5.0, 3.0, 1.9]), ("max", [0.0, 1.0, 2.1])])
def test_a_threshold_ends_the_run(tmp_path: Path, mode: Any, scores: list[float]) -> None:
    """The run ends once the value is better than the threshold."""
    stopping = EarlyStopping("val/score", mode=mode, stopping_threshold=2.0)
    reason = f"val/score = {scores[-1]:g} is better than 2"
    assert run(tmp_path, stopping, scores) == (3, reason)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_ends_the_run(tmp_path: Path, bad: float) -> None:
    """NaN and infinities end the run at once."""
    assert run(tmp_path, EarlyStopping("val/score"), [1.0, bad]) == (2, f"val/score is {bad}")


def test_not_finite_values_can_be_let_pass(tmp_path: Path) -> None:
    """With check_finite=False a NaN is no improvement, and never the best score."""
    stopping = EarlyStopping("val/score", check_finite=False, patience=2)
    epochs, _ = run(tmp_path, stopping, [math.nan, 3.0, 2.0, math.nan, 2.0])
    assert (epochs, stopping.best_score) == (5, 2.0)


def test_epochs_without_validation_do_not_count(tmp_path: Path) -> None:
    """If only some epochs are validated, only those count, from the first on."""
    epochs, _ = run(
        tmp_path, EarlyStopping("val/score", patience=2), [3.0, 4.0, 5.0], check_val_every_n_epoch=3
    )
    assert epochs == 9


def test_a_monitor_that_was_not_logged_is_named(tmp_path: Path) -> None:
    """A value that is never logged is an error with the logged names."""
    with pytest.raises(
        ConfigError,
        match=(
            r"EarlyStopping\.monitor is .*, which was not logged for an epoch; there are"
            r" val/score\."
        ),
    ):
        run(tmp_path, EarlyStopping("val/los"), [1.0])


def test_a_value_of_the_epoch_is_not_there_at_a_validation_within_it(tmp_path: Path) -> None:
    """The error names the setting that checks where the value is; with it the run trains."""

    class Logs(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train/score", 1.0, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    def fit(**settings: Any) -> int:
        stopping = EarlyStopping("train/score", patience=1, **settings)
        trainer = quiet(tmp_path, max_epochs=5, callbacks=stopping, val_check_interval=1)
        trainer.fit(Logs(), loader(8), loader(4))
        return trainer.current_epoch

    with pytest.raises(ConfigError, match=r"Of a whole epoch: check_on_train_epoch_end=true"):
        fit()
    assert fit(check_on_train_epoch_end=True) == 2


def test_a_best_value_that_was_none_is_replaced() -> None:
    """Checkpoints of older versions may hold null or NaN as the best value."""
    stopping = EarlyStopping("val/score", check_finite=False)
    for best in (None, math.nan):
        stopping.load_state_dict({"best_score": best, "wait_count": 0})
        assert stopping.best_score == math.inf


def test_training_values_can_be_monitored(tmp_path: Path) -> None:
    """A value logged per training epoch can be monitored without any validation."""

    class Logs(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train/score", 1.0, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    trainer = quiet(tmp_path, max_epochs=9, callbacks=EarlyStopping("train/score", patience=2))
    trainer.fit(Logs(), loader(4))
    assert trainer.current_epoch == 3


@pytest.mark.parametrize(
    ("mode", "scores"), [("min", [5.0, 9.0, 10.1]), ("max", [5.0, 1.0, -10.1])]
)
def test_a_value_that_is_too_bad_ends_the_run(
    tmp_path: Path, mode: Any, scores: list[float]
) -> None:
    """The run ends once the value is worse than the threshold, and not at the threshold."""
    limit = 10.0 if mode == "min" else -10.0
    stopping = EarlyStopping("val/score", mode=mode, divergence_threshold=limit, patience=9)
    assert run(tmp_path, stopping, [limit, *scores]) == (
        4,
        f"val/score = {scores[-1]:g} is worse than {limit:g}",
    )


def test_each_validation_can_count(tmp_path: Path) -> None:
    """With check_on_train_epoch_end=false validations within an epoch count,
    and the run ends after one.
    """
    stopping = EarlyStopping("val/score", patience=2, check_on_train_epoch_end=False)
    trainer = quiet(
        tmp_path, max_epochs=9, callbacks=stopping, val_check_interval=2, num_sanity_val_steps=1
    )
    trainer.fit(Scored([0.0, 5.0, 4.0, 4.0, 4.0, 1.0]), loader(24), loader(4))
    assert (trainer.global_step, trainer.state.stop_reason) == (
        8,
        "val/score has not improved on 4 for 2 validations",
    )


def test_a_value_that_is_not_logged_can_be_waited_for(tmp_path: Path) -> None:
    """strict=false waits for the value; by default an unknown name is an error."""
    trainer = quiet(tmp_path, max_epochs=2, callbacks=EarlyStopping("val/scroe", strict=False))
    trainer.fit(Line(), loader(4), loader(4))
    assert trainer.current_epoch == 2


def test_improvements_are_printed_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """verbose=True prints each one, and stands where Lightning has it."""
    run(tmp_path, EarlyStopping("val/score", patience=1), [3.0, 2.0, 2.5])
    assert "is better than" not in capsys.readouterr().out
    run(tmp_path, EarlyStopping("val/score", 0.0, 1, True, "min"), [3.0, 2.0, 2.5])
    printed = [line for line in capsys.readouterr().out.splitlines() if "is better than" in line]
    assert printed == ["val/score = 3 is better than inf.", "val/score = 2 is better than 3."]


def test_arguments_that_mean_nothing_here_are_taken() -> None:
    """The reason for a stop is always printed, by rank 0."""
    EarlyStopping("val/score", log_rank_zero_only=True)  # type: ignore[call-arg]


def test_a_second_fit_stops_early_by_itself(tmp_path: Path) -> None:
    """What was the best of the first is nothing to it."""
    stopping = EarlyStopping("val/loss", patience=2)
    trainer = quiet(tmp_path, max_epochs=6, callbacks=stopping)
    steps = []
    for _ in range(2):
        task = Line(lr=0.01)
        trainer.fit(task, loader(20), loader(5))
        steps.append(trainer.global_step)
    assert steps[0] == steps[1] > 10


def test_a_monitored_step_value_has_a_name_of_its_own(tmp_path: Path) -> None:
    """It was logged, but for steps alone."""
    with pytest.raises(
        ConfigError, match=r"'train/loss', which was not logged for an epoch; .*on_epoch=True"
    ):
        quiet(tmp_path, callbacks=EarlyStopping("train/loss")).fit(Line(), loader(8))


def test_a_state_of_an_older_trainkit_is_read() -> None:
    """It named a state by class and place; another value's is not taken for this one's."""
    saved = {"best_score": 0.5, "wait_count": 2}
    stopping = EarlyStopping(monitor="val/score")
    assert not CallbacksPart([stopping]).load_state_dict({"EarlyStopping.0": saved})
    assert stopping.state_dict() == saved | {"validations_seen": 0}
    stopping.load_state_dict({"best_score": None, "wait_count": 1})  # before the first value
    assert stopping.best_score == math.inf
    [left] = CallbacksPart([EarlyStopping(monitor="val/other")]).load_state_dict(
        CallbacksPart([stopping]).state_dict()
    )
    assert left == "the state of EarlyStopping{'monitor': 'val/score', 'mode': 'min'}"


def test_a_value_that_was_counted_is_not_counted_again_after_a_resume(tmp_path: Path) -> None:
    """An epoch without a validation has none; the run continues as if it had never stopped."""
    settings: dict[str, Any] = {"num_sanity_val_steps": 0, "check_val_every_n_epoch": 2}

    def fit(epochs: int, ckpt_path: str | None, scores: list[float]) -> int:
        stopping = EarlyStopping("val/score", patience=1, check_on_train_epoch_end=True)
        callbacks = [stopping, ModelCheckpoint()]
        trainer = quiet(tmp_path, max_epochs=epochs, callbacks=callbacks, **settings)
        trainer.fit(Scored(scores), loader(4), loader(4), ckpt_path=ckpt_path)
        return trainer.current_epoch

    fit(2, None, [5.0])
    assert fit(4, "last", [4.0]) == 4
