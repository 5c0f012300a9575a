"""Lightning's names for parts of a Run; each is one attribute away."""

from __future__ import annotations

from typing import Any

from trainkit.api.callback import Callback
from trainkit.api.datamodule import DataModule
from trainkit.api.state import TrainState
from trainkit.api.task import Task
from trainkit.api.view import checkpoint_policies
from trainkit.engine.base import Engine
from trainkit.loggers.base import Logger, loggers_of


class LightningNames:
    """Base of Run.

    Attributes:
        datamodule: the one that was given, or None.
    """

    task: Task
    callbacks: list[Callback]
    engine: Engine
    state: TrainState
    datamodule: DataModule | None = None

    @property
    def model(self) -> Task:
        """The task, by Lightning's name."""
        return self.task

    @property
    def loggers(self) -> list[Logger]:
        """The loggers, in the order of the callbacks."""
        return loggers_of(self.callbacks)

    @property
    def logger(self) -> Logger | None:
        """The first of them."""
        return next(iter(self.loggers), None)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The callbacks that write checkpoints."""
        return list(checkpoint_policies(self.callbacks))

    @property
    def checkpoint_callback(self) -> Any:
        """The first of them, or None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callback(self) -> Any:
        """The first EarlyStopping, or None."""
        return next((callback for callback in self.callbacks if hasattr(callback, "stopping_threshold")), None)

    @property
    def sanity_checking(self) -> bool:
        """Whether the few validation batches before training run now."""
        return self.state.stage == "sanity_check"

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.engine.ranks.is_main

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.engine.ranks.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.engine.ranks.world_size
