"""Lightning's names for parts of a Run; each is one attribute away."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from trainkit.api.callback import Callback
from trainkit.api.datamodule import DataModule
from trainkit.api.dispatch import Hooks
from trainkit.api.options import (
    BatchOptions,
    EvaluationOptions,
    LimitOptions,
    NumericOptions,
    Options,
    SampleOptions,
)
from trainkit.api.state import TrainState
from trainkit.api.task import Task
from trainkit.api.view import with_role
from trainkit.callbacks.checkpoint import checkpoint_policies
from trainkit.data.feed import Feed
from trainkit.engine.base import Engine
from trainkit.errors import ConfigError
from trainkit.extension import advice
from trainkit.loggers.base import Logger, loggers_of
from trainkit.metrics.latest import LatestMetrics
from trainkit.optim.batch_plan import BatchPlan
from trainkit.run.evaluator import Evaluator
from trainkit.run.step_parts import StepParts

# The Trainer's arguments that hooks may read by name: their group among the options, and Lightning's
# value for what is not set.
SETTINGS: dict[str, tuple[str, Any]] = {
    "check_val_every_n_epoch": ("evaluation", None),
    "gradient_clip_val": ("numerics", None),
    "limit_predict_batches": ("evaluation", 1.0),
    "limit_test_batches": ("evaluation", 1.0),
    "limit_train_batches": ("batch", 1.0),
    "limit_val_batches": ("evaluation", 1.0),
    "log_every_n_steps": ("limits", 50),
    "min_epochs": ("limits", 0),
    "min_steps": ("limits", None),
    "num_sanity_val_steps": ("evaluation", math.inf),
    "overfit_batches": ("batch", 0.0),
    "val_check_interval": ("evaluation", 1.0),
}


def missing(name: str) -> str:
    """Return the sentence for a name that a Trainer and a Run lack."""
    return f"'Trainer' object has no attribute '{name}'{advice('Trainer', name)}"


def explain_missing(error: BaseException | None) -> None:
    """Let the error of a hook that asked its trainer, or an optimizer, for a name of Lightning's say
    what to use here.

    A Run has no __getattr__: with one, Python looks up each attribute of each step the slow way.
    """
    if not isinstance(error, AttributeError) or not error.name:
        return
    if isinstance(error.obj, Limits):
        error.args = (missing(error.name),)
    elif isinstance(error.obj, Optimizer):
        error.args = (f"{error}{advice('an optimizer', error.name)}",)


class _Setting:
    """A setting of a Trainer or a Run, by its name in Lightning."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._group, self._unset = SETTINGS[name]

    def __get__(self, trainer: Any, owner: type) -> Any:
        if trainer is None:
            return self
        value = getattr(getattr(trainer.options, self._group), self._name)
        return self._unset if value is None else value


# What a Trainer is made with; a Run's precision is its object of that name.
_GROUPS = (BatchOptions, LimitOptions, EvaluationOptions, NumericOptions, SampleOptions)
_MORE = "enable_checkpointing enable_model_summary enable_progress_bar fast_dev_run logger max_time seed"
_FIXED = {*_MORE.split(), *(name for group in _GROUPS for name in group.__annotations__)}
_FIXED -= {"precision"}


class Limits:
    """Base of Trainer and Run."""

    options: Options

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED:
            raise ConfigError(
                f"trainer.{name} = {value!r} would change nothing: a Trainer's settings hold from"
                f" its start. Make a Trainer({name}=...) for it, or for the next phase: the Task"
                " keeps its weights."
            )
        super().__setattr__(name, value)

    @property
    def max_epochs(self) -> int:
        """The limit of epochs; -1 if there is none, as in Lightning."""
        limit = self.options.limits.max_epochs
        return -1 if limit is None else limit

    @property
    def max_steps(self) -> int:
        """The limit of steps; -1 if there is none, as in Lightning."""
        return self.options.limits.max_steps or -1

    @property
    def fast_dev_run(self) -> int:
        """The batches of a quick try; 0 if it is none."""
        return self.options.fast_dev_run


class _Parts:
    task: Task
    callbacks: list[Callback]
    engine: Engine
    hooks: Hooks
    evaluator: Evaluator
    state: TrainState
    step: StepParts
    run_dir: Path
    train_feed: Feed
    batch_plan: BatchPlan
    callback_metrics: LatestMetrics


for _name in SETTINGS:
    setattr(Limits, _name, _Setting(_name))


class LightningNames(_Parts, Limits):
    """Base of Run.

    Attributes:
        datamodule: the one that was given, or None.
    """

    datamodule: DataModule | None = None

    @property
    def accumulate_grad_batches(self) -> int:
        """Microbatches of one rank in a step of the epoch in progress."""
        return self.batch_plan.at(self.state.current_epoch).accumulate

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self.state.global_step

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
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """All EarlyStoppings."""
        return with_role(self.callbacks, "early_stopping")

    @property
    def progress_bar_callback(self) -> Any:
        """The progress bar, or None."""
        return next(iter(with_role(self.callbacks, "progress_bar")), None)

    @property
    def lightning_module(self) -> Task:
        """The task, by another of Lightning's names."""
        return self.task

    @property
    def log_dir(self) -> str:
        """The run's folder."""
        return str(self.run_dir)

    @property
    def training(self) -> bool:
        """Whether this is a fit, outside of its sanity check and its validations."""
        return self.state.stage == "train"

    @property
    def validating(self) -> bool:
        """Whether this is a run of `validate`, or a validation within a fit."""
        return self.state.stage == "validate"

    @property
    def testing(self) -> bool:
        """Whether this is a run of `test`."""
        return self.state.phase == "test"

    @property
    def predicting(self) -> bool:
        """Whether this is a run of `predict`."""
        return self.state.phase == "predict"

    @property
    def num_training_batches(self) -> float:
        """Batches of this rank in the epoch in progress; inf if unknown."""
        count = self.train_feed.num_batches_in(self.state.current_epoch)
        return math.inf if count is None else count

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch in progress is this rank's last of the epoch,
        as far as that is known.
        """
        in_progress = self.step.num_ahead if self.step.manual is None else 1
        return self.state.batch_idx + in_progress >= self.num_training_batches

    @property
    def local_rank(self) -> int:
        """This rank's number on its host."""
        return self.engine.ranks.local_rank

    @property
    def num_devices(self) -> int:
        """Ranks of this host."""
        return self.engine.ranks.local_size

    @property
    def num_nodes(self) -> int:
        """Hosts, if each has as many ranks as this one."""
        return max(1, self.world_size // max(1, self.num_devices))

    @property
    def logged_metrics(self) -> dict[str, float]:
        """The latest values, as callback_metrics, without those of `logger=False`."""
        return self.hooks.log.shown(dict(self.callback_metrics))

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only."""
        if self.is_global_zero:
            print(*values, **options)

    @property
    def sanity_checking(self) -> bool:
        """Whether the few validation batches before training run now."""
        return self.state.phase == "sanity_check"

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
