"""RunView: a hook's view of a run, under the argument name `trainer`; `Task.trainer` is the same.

Lightning's names if the meaning is Lightning's, then the services that callbacks use. run/run.py's Run implements it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from trainkit.api.options import Options
from trainkit.api.state import TrainState
from trainkit.checkpoint.manager import CheckpointManager
from trainkit.checkpoint.store import Store
from trainkit.data.feed import Feed
from trainkit.device.precision import Precision
from trainkit.engine.base import Engine
from trainkit.metrics.log import LatestMetrics
from trainkit.optim.batch_plan import BatchPlan
from trainkit.optim.schedule import LearningRates


class Agreement(Protocol):
    """A question to rank 0, as run/coordinator.py answers it.

    Attributes:
        agreed: set on all ranks at the same step, after rank 0 answered yes; clear it to ask again.
    """

    agreed: bool


class Coordination(Protocol):
    """Decisions that all ranks take at the same step.

    Attributes:
        now: seconds since the start by rank 0's clock, the same on all ranks; at most about half a second old.
    """

    now: float

    def sync_clock(self) -> float:
        """Update `now` by a message and return it. Call it on all ranks."""

    def expect_new_pace(self) -> None:
        """Exchange at the next round: the length of rounds changes here. Call it on all ranks."""

    def register(self, name: str, ask: Callable[[], bool]) -> Agreement:
        """Ask rank 0 about twice a second from now on. Call it on all ranks, in the same order."""


class Evaluation(Protocol):
    """The validations of a fit.

    Attributes:
        num_validations: validations that have run.
        names: names of the values that validation logged.
        prog_bar_names: names of the values for the progress bar, training's included.
        num_batches: batches of this rank in the evaluation in progress, if known.
    """

    num_validations: int
    names: set[str]
    num_batches: int | None

    @property
    def prog_bar_names(self) -> set[str]:
        """See the class."""

    @property
    def is_awaited(self) -> bool:
        """Whether there is validation data, and no validation has run yet."""

    def validate(self) -> Mapping[str, float]:
        """Validate inside a fit and return the logged values; empty without validation data. Call it on all ranks."""


class Commits(Protocol):
    """An elastic run's commits in memory; see run/elastic.py."""

    def begin(self) -> None:
        """Handle signals from here on, and commit. Call it on all ranks when training starts."""

    def commit(self) -> None:
        """Copy a checkpoint's contents to host memory. Call it on all ranks."""


class RunView(Protocol):
    """See the module. The parts of a fit (from `train_feed` on) exist from on_fit_start on."""

    callbacks: list[Any]
    callback_metrics: LatestMetrics
    run_dir: Path
    engine: Engine
    state: TrainState
    options: Options
    precision: Precision
    checkpoints: CheckpointManager

    @property
    def task(self) -> nn.Module: ...  # noqa: D102
    @property
    def global_step(self) -> int: ...  # noqa: D102
    @property
    def current_epoch(self) -> int: ...  # noqa: D102
    @property
    def max_epochs(self) -> int | None: ...  # noqa: D102
    @property
    def max_steps(self) -> int | None: ...  # noqa: D102
    @property
    def should_stop(self) -> bool: ...  # noqa: D102
    @property
    def sanity_checking(self) -> bool: ...  # noqa: D102
    @property
    def is_global_zero(self) -> bool: ...  # noqa: D102
    @property
    def global_rank(self) -> int: ...  # noqa: D102
    @property
    def world_size(self) -> int: ...  # noqa: D102
    @property
    def coordinator(self) -> Coordination: ...  # noqa: D102
    @property
    def evaluator(self) -> Evaluation: ...  # noqa: D102
    @property
    def elastic(self) -> Commits | None: ...  # noqa: D102

    train_feed: Feed
    batch_plan: BatchPlan
    optimizers: Sequence[torch.optim.Optimizer]
    rates: LearningRates

    @property
    def total_steps(self) -> int | None: ...  # noqa: D102
    @property
    def estimated_stepping_batches(self) -> int: ...  # noqa: D102
    @property
    def step_clock(self) -> Any: ...  # noqa: D102

    def request_stop(self, reason: str) -> None:
        """End training after the current step. Call it on all ranks at the same step."""

    def say(self, text: str) -> None:
        """Print on rank 0."""

    def log_metrics(self, values: dict[str, float]) -> None:
        """Pass values of this step to the loggers."""

    def wrap_hooks(self, around: Callable[[str, str, Callable[..., Any]], Callable[..., Any]]) -> None:
        """Wrap each call of a hook; see Hooks.wrap."""

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint folder (or fsspec URL), and wait for it. Call it on all ranks."""


class CheckpointPolicy(Protocol):
    """A callback that decides which checkpoints are written and which are retained; ModelCheckpoint is one.

    Attributes:
        store: the location of its checkpoints.
        dirpath: the user's folder, if any.
        save_weights_only: whether a run cannot resume from them.
        last_model_path: the newest one; "" before the first.
    """

    dirpath: str | None
    save_weights_only: bool

    def store_of(self, run_dir: Path) -> Store:
        """Return the location of its checkpoints in a run with this folder."""

    @property
    def last_model_path(self) -> str: ...  # noqa: D102

    def save_now(self, trainer: RunView) -> bool:
        """Save this step, unless it is saved; return, on all ranks, whether it is on disk. Call it on all ranks."""

    def renew(self) -> None:
        """Save again when a save is due, although no step was taken: the weights have changed."""


class ElasticSettings(Protocol):
    """A callback that requests an elastic run; Elastic is one.

    Attributes:
        commit_every_n_steps: steps between two commits.
    """

    commit_every_n_steps: int


def checkpoint_policies(callbacks: Sequence[Any]) -> list[CheckpointPolicy]:
    """Return the callbacks that decide about checkpoints."""
    return [callback for callback in callbacks if hasattr(callback, "save_now")]


def elastic_settings(callbacks: Sequence[Any]) -> ElasticSettings | None:
    """Return the callback that requests an elastic run, if any."""
    return next((callback for callback in callbacks if hasattr(callback, "commit_every_n_steps")), None)
