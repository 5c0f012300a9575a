"""Timer: measures the training time of a run over its restarts, and ends the run at a limit."""

from __future__ import annotations

import time
from typing import Any, ClassVar, Literal

from trainkit.api.callback import Callback
from trainkit.api.lightning_arguments import nothing
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import Duration, checked, seconds_of
from trainkit.errors import ConfigError

STAGES = ("train", "validate", "test")


@checked
class Timer(Callback):
    """Measures training, and ends it after `duration`, at the same step on all ranks.

    It counts the time from training's first hook to its last, validations included, over all starts
    of the run: the checkpoint stores it. The clock is rank 0's, sent to all ranks about twice a
    second; a started step is finished. A ModelCheckpoint with save_last saves at the end of the
    run. `trainer.max_time` adds a Timer.

    Args:
        duration: training time limit; None only measures.
        interval: check the clock at each step's end or at each epoch's.
    """

    config_key = "callbacks.timer"

    taken_arguments: ClassVar = {"verbose": nothing}

    def __init__(
        self, duration: Duration | None = None, interval: Literal["step", "epoch"] = "step"
    ) -> None:
        self.duration = duration
        self.duration_s = None if duration is None else seconds_of(duration)
        self.interval = interval
        self._begun: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._before = 0.0  # seconds of training before this start
        self._clock_at_start = 0.0
        self._agreed = 0.0  # seconds of training by the agreed clock, the same on all ranks

    @property
    def ends_run(self) -> bool:  # type: ignore[override]
        return self.duration_s is not None

    def start_time(self, stage: str = "train") -> float | None:
        """Return when a stage began ("train", "validate", "test"), by time.monotonic();
        None if it has not.
        """
        return self._begun.get(_known(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return when a stage ended, by time.monotonic(); None if it has not."""
        return self._ended.get(_known(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds of a stage by this rank's clock;
        those of training include the time before a restart.
        """
        begun, before = self.start_time(stage), self._before if stage == "train" else 0.0
        return (
            before if begun is None else before + self._ended.get(stage, time.monotonic()) - begun
        )

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the seconds left of `duration`, at least 0; None without a limit."""
        return (
            None
            if self.duration_s is None
            else max(0.0, self.duration_s - self.time_elapsed(stage))
        )

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        if stage == "fit":
            self._before = self._agreed = 0.0
            self._begun.clear()
            self._ended.clear()

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Start the clock; a resumed run may have no time left."""
        self._begin("train")
        self._clock_at_start = trainer.coordinator.sync_clock()
        self._look(trainer)

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        self._look(trainer, self.interval == "step")

    def on_train_epoch_end(self, trainer: RunView, task: Task) -> None:
        self._look(trainer)

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        self._ended["train"] = time.monotonic()

    def on_validation_start(self, trainer: RunView, task: Task) -> None:
        self._begin("validate")

    def on_validation_end(self, trainer: RunView, task: Task) -> None:
        self._ended["validate"] = time.monotonic()

    def on_test_start(self, trainer: RunView, task: Task) -> None:
        self._begin("test")

    def on_test_end(self, trainer: RunView, task: Task) -> None:
        self._ended["test"] = time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds of training so far, the same on all ranks."""
        return {"time_elapsed": self._agreed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = self._agreed = float(state_dict["time_elapsed"])

    def _begin(self, stage: str) -> None:
        self._begun[stage] = time.monotonic()
        self._ended.pop(stage, None)

    def _look(self, trainer: RunView, stops: bool = True) -> None:
        self._agreed = self._before + trainer.coordinator.now - self._clock_at_start
        if stops and self.duration_s is not None and self._agreed >= self.duration_s:
            trainer.request_stop(
                f"the time limit is reached: {_shown(self._agreed)} of training, the limit is"
                f" {_shown(self.duration_s)}"
            )


def _known(stage: str) -> str:
    if stage not in STAGES:
        raise ConfigError(f"Timer: the stage is '{stage}'; it must be one of {', '.join(STAGES)}.")
    return stage


def _shown(seconds: float) -> str:
    """Format seconds as h:mm:ss, with days in front if there are any; below a minute as seconds."""
    whole = round(seconds)
    days, rest = divmod(whole, 86400)
    text = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{seconds:.1f} s" if whole < 60 else f"{days} d {text}" if days else text
