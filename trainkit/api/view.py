"""RunView: what hooks see of a run, under the argument name `trainer`; `Task.trainer` is the same.

It has Lightning's names if the meaning is Lightning's, and the services that callbacks use.
run/run.py's Run implements and documents it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from trainkit.api.options import Options
from trainkit.api.state import TrainState
from trainkit.checkpoint.manager import CheckpointManager
from trainkit.data.feed import Feed
from trainkit.device.precision import Precision
from trainkit.engine.base import Engine
from trainkit.engine.coordinator import Coordinator
from trainkit.metrics.hook_log import HookLog
from trainkit.metrics.latest import LatestMetrics
from trainkit.optim.batch_plan import BatchPlan
from trainkit.optim.schedule import LearningRates

# What a run, or a command, looks a callback up for; its class says it (Callback.role):
#     checkpoints      decides which checkpoints are written, and which stay: a ModelCheckpoint
#     early_stopping   ends training by a value: trainer.early_stopping_callback
#     elastic          makes a fit's attempts in an elastic run (its `fit`), and commits its state
#     layers           replaces layers of the Task: a LayerChange of api/layers.py
#     metrics_server   serves metrics at `address`
#     metrics_table    writes metrics.csv
#     progress_bar     shows the progress: trainer.progress_bar_callback
#     shares           gives samples to ranks by measured speed
#     step_clock       measures steps: step_clock_of(trainer)
Role = Literal[
    "checkpoints",
    "early_stopping",
    "elastic",
    "layers",
    "metrics_server",
    "metrics_table",
    "progress_bar",
    "shares",
    "step_clock",
    "weight_average",
]


class Evaluation(Protocol):
    """See run/evaluator.py."""

    num_validations: int
    names: set[str]
    num_batches: int | None
    interval: int | None

    @property
    def has_data(self) -> bool: ...
    @property
    def prog_bar_names(self) -> set[str]: ...
    @property
    def is_awaited(self) -> bool: ...
    @property
    def dataset(self) -> Any: ...
    def sample_indices(self) -> list[int] | None: ...
    def validate(self) -> Mapping[str, float]: ...


class Commits(Protocol):
    """What an elastic run keeps in memory; see run/elastic.py."""

    def begin(self, commits: bool = True) -> None: ...
    def commit(self) -> None: ...
    def hold(self) -> None: ...


class HookTable(Protocol):
    """See api/dispatch.py."""

    log: HookLog

    def __call__(self, name: str, *args: Any) -> None: ...
    def wrap(
        self, around: Callable[[str, str, Callable[..., Any]], Callable[..., Any]]
    ) -> None: ...


class LightningView(Protocol):
    """See run/lightning_names.py."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def loggers(self) -> list[Any]: ...
    @property
    def logger(self) -> Any: ...
    @property
    def datamodule(self) -> Any: ...
    @property
    def sanity_checking(self) -> bool: ...
    @property
    def is_global_zero(self) -> bool: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...


class RunView(LightningView, Protocol):
    """See the module. The parts of a fit (from `train_feed` on) are there from on_fit_start on."""

    callbacks: list[Any]
    callback_metrics: LatestMetrics
    run_dir: Path
    engine: Engine
    state: TrainState
    options: Options
    precision: Precision
    checkpoints: CheckpointManager
    coordinator: Coordinator

    train_feed: Feed
    batch_plan: BatchPlan
    optimizers: Sequence[torch.optim.Optimizer]
    rates: LearningRates

    # Read-only: a Run has a subtype of each.
    @property
    def task(self) -> nn.Module: ...
    @property
    def hooks(self) -> HookTable: ...
    @property
    def evaluator(self) -> Evaluation: ...
    @property
    def elastic(self) -> Commits | None: ...

    @property
    def global_step(self) -> int: ...
    @property
    def current_epoch(self) -> int: ...
    @property
    def max_epochs(self) -> int: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def should_stop(self) -> bool: ...
    @should_stop.setter
    def should_stop(self, value: bool) -> None: ...
    @property
    def total_steps(self) -> int | None: ...
    @property
    def estimated_stepping_batches(self) -> int: ...

    def set_rank_shares(self, shares: Sequence[int]) -> None: ...
    def request_stop(self, reason: str, at_once: bool = False) -> None: ...
    def say(self, text: str) -> None: ...
    def log_metrics(self, values: dict[str, float]) -> None: ...
    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None: ...


def with_role(callbacks: Sequence[Any], role: Role) -> list[Any]:
    """Return those callbacks that have a role, in their order."""
    return [callback for callback in callbacks if callback.role == role]


def elastic_of(callbacks: Sequence[Any]) -> Any:
    """Return the callback that asks for an elastic run; None if there is none."""
    return next(iter(with_role(callbacks, "elastic")), None)


def step_clock_of(trainer: RunView) -> Any:
    """Return the StepClock among the callbacks;
    it is there if one of them has `uses_step_clock`.
    """
    return with_role(trainer.callbacks, "step_clock")[0]
