"""What a Trainer answers about the run in progress, or the last one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainkit.api.callback import Callback
from trainkit.api.state import TrainState
from trainkit.api.task import Task
from trainkit.engine.base import Engine
from trainkit.errors import ConfigError
from trainkit.loggers.base import loggers_of
from trainkit.optim.batch_plan import BatchPlan
from trainkit.run.lightning_names import Limits, missing
from trainkit.run.run import Run
from trainkit.run.setup import Stage


class LastRun(Limits):
    """Part of Trainer."""

    callbacks: list[Callback]
    _stage: Stage | None = None  # of the entry point in progress, or of the last one
    _fitted: Run | None = None  # the last one that trained

    @property
    def _run(self) -> Run | None:
        return self._stage.run if self._stage is not None and self._stage.is_open else None

    def _model(self, task: Task | None, ckpt_path: str | None) -> tuple[Task, str | None]:
        """Return what is evaluated: without a task, that of the last fit at its best checkpoint.

        Raises:
            ConfigError: no fit has run.
        """
        if task is not None:
            return task, ckpt_path
        if self._fitted is None:
            raise ConfigError(
                "No model was given, and this Trainer has not trained one yet: pass it, or call fit"
                " first."
            )
        own = self._fitted.checkpoint_callback
        return (
            self._fitted.task,
            ckpt_path or (own.best_model_path if own is not None else "") or None,
        )

    @property
    def run(self) -> Run:
        """The run in progress, or the last one; hooks receive it.

        Raises:
            ConfigError: nothing has run yet, or this rank takes no part.
        """
        return self._last_stage.run

    @property
    def _last_stage(self) -> Stage:
        if self._stage is None:
            raise ConfigError(
                "The Trainer has not run yet: call fit, validate, test or predict first."
            )
        return self._stage

    @property
    def state(self) -> TrainState:
        """The counters."""
        return self._last_stage.state

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self.state.global_step

    @property
    def current_epoch(self) -> int:
        """The epoch in progress, from 0."""
        return self.state.current_epoch

    @property
    def engine(self) -> Engine:
        """The ranks."""
        return self._last_stage.engine

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0; ranks that take no part know it too."""
        return self.engine.ranks.is_main

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.engine.ranks.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.engine.ranks.world_size

    @property
    def run_dir(self) -> Path:
        """The run's folder, the same on all ranks."""
        if not self.engine.ranks.takes_part:
            raise ConfigError(
                "trainer.run_dir: this rank is not in engine.process_set and has no run folder."
            )
        return self.run.run_dir

    @property
    def batch_plan(self) -> BatchPlan:
        """The arithmetic of batch and learning rate of the last fit."""
        if self._fitted is None:
            raise ConfigError("No fit has run yet, so there is no batch plan: call fit first.")
        return self._fitted.batch_plan

    @property
    def callback_metrics(self) -> dict[str, float]:
        """The latest logged values; empty before the first run."""
        return {} if self._run is None else self._run.callback_metrics

    @property
    def should_stop(self) -> bool:
        """Whether training ends after the current step; set it to request that, as in Lightning."""
        return self.run.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.run.should_stop = value

    def __getattr__(self, name: str) -> Any:
        """Ask the run for what a Trainer of Lightning's has too:
        global_step, world_size, request_stop(reason), ...
        """
        if name in ("logger", "loggers") and self._run is None:  # of the run to come
            loggers = loggers_of(self.callbacks)
            return loggers if name == "loggers" else next(iter(loggers), None)
        if name.startswith("_") or not (
            hasattr(Run, name) or name in (*Run.__annotations__, "datamodule")
        ):
            raise AttributeError(missing(name))
        return getattr(self.run, name)
