"""Run: one fit, validate, test or predict; what the loop works with, and what hooks receive as `trainer`.

A Run begins with the stage (setup.py): counters, ranks, folder, hooks. Before training build.py adds the parts of a fit: feeds,
plan, optimizers, rates. Hooks see it as api/view.py's RunView.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from trainkit.api.callback import Callback
from trainkit.api.dispatch import Hooks
from trainkit.api.options import Options
from trainkit.api.state import StageName, TrainState
from trainkit.api.task import Task
from trainkit.checkpoint.manager import CheckpointManager
from trainkit.checkpoint.places import make_store
from trainkit.console import info
from trainkit.data.feed import Feed, MapFeed, Microbatch, Step
from trainkit.data.shares import read_words, words_of
from trainkit.device.precision import Precision
from trainkit.engine.base import Engine
from trainkit.errors import ConfigError
from trainkit.metrics.latest import LatestMetrics
from trainkit.metrics.log import MetricLog
from trainkit.metrics.objects import EpochMetrics
from trainkit.optim.batch_plan import BatchPlan
from trainkit.optim.sample_weights import SampleWeights
from trainkit.optim.schedule import LearningRates
from trainkit.run.coordinator import Coordinator
from trainkit.run.elastic import ElasticState
from trainkit.run.evaluator import Evaluator
from trainkit.run.finite import FiniteLosses, LossWatch
from trainkit.run.lightning_names import LightningNames
from trainkit.run.oom import Halving
from trainkit.run.stopping import Stopping


class ManualBatches(Protocol):
    """See run/manual.py."""

    updated: bool

    def batches(self, step: Step) -> Iterable[Microbatch]: ...  # noqa: D102
    def batch(self, num_samples: int, num_in_step: int) -> AbstractContextManager[None]: ...  # noqa: D102


class OpenBatch(NamedTuple):
    """A microbatch before its on_train_batch_end, and what the hook gets."""

    num_samples: int
    outputs: Any
    batch: Any
    batch_idx: int


@dataclass
class StepParts:
    """What a training step works with beside the optimizers.

    Attributes:
        weights: of the microbatches.
        metrics: the Task's metric objects.
        watch: reports losses that are not finite.
        log: the values of this epoch so far.
        sync_guard: a context that ends the run if the device is read (trainer.assert_no_sync).
        finite: looks at losses (trainer.stop_on_nonfinite).
        halving: splits microbatches (trainer.halve_batch_on_oom).
        clears_late: whether a hook reads the gradients of the last step (on_before_zero_grad): they are then dropped before the
            next backward, else after the update, when they no longer take memory.
        has_old: whether a backward must first drop them.
        has_skipped: whether the Task has skipped a batch of this run.
        has_begun: whether a batch of this step has begun.
        open_batch: this rank's last microbatch of the step, whose on_train_batch_end follows the update.
        manual: runs a Task that updates its weights itself.
    """

    weights: SampleWeights
    metrics: EpochMetrics
    watch: LossWatch
    clears_late: bool = False
    has_old: bool = False
    has_begun: bool = False
    has_skipped: bool = False
    open_batch: OpenBatch | None = None
    log: MetricLog = field(default_factory=MetricLog)
    sync_guard: AbstractContextManager[None] = field(default_factory=contextlib.nullcontext)
    finite: FiniteLosses | None = None
    halving: Halving | None = None
    manual: ManualBatches | None = None

    def __post_init__(self) -> None:
        self.has_old = self.clears_late


class _NotThereYet:
    """Stands for a part that is not built yet. (A `__getattr__` of Run would slow each access in the loop down.)"""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def _refuse(self, *_: Any) -> Any:
        raise ConfigError(
            f"trainer.{self.__dict__['name']} is not there yet: the run is being set up. Use it in on_fit_start or later."
        )

    __getattr__ = __iter__ = __len__ = __getitem__ = __call__ = __enter__ = __fspath__ = _refuse


class Run(LightningNames):
    """See the module; the Trainer's docstring explains `options`, RunView the rest.

    The parts of a fit are there once it is built; asked for earlier, they raise ConfigError.
    """

    hooks: Hooks
    run_dir: Path
    precision: Precision
    checkpoints: CheckpointManager
    coordinator: Coordinator
    stopping: Stopping
    evaluator: Evaluator
    train_feed: Feed
    batch_plan: BatchPlan
    optimizers: Sequence[torch.optim.Optimizer]
    rates: LearningRates
    step: StepParts

    def __init__(self, stage: StageName, task: Task, options: Options, callbacks: Sequence[Callback], engine: Engine) -> None:
        self.task, self.options, self.callbacks, self.engine = task, options, list(callbacks), engine
        self.state = TrainState(stage=stage)
        self.callback_metrics = LatestMetrics()
        self.elastic: ElasticState | None = None
        self.reload: Callable[[int], None] | None = None  # makes the data of an epoch, if they are not the same in all
        for name in Run.__annotations__:
            setattr(self, name, _NotThereYet(name))

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self.state.global_step

    @property
    def current_epoch(self) -> int:
        """The epoch in progress, from 0."""
        return self.state.current_epoch

    @property
    def max_epochs(self) -> int | None:
        """The limit of epochs."""
        return self.options.limits.max_epochs

    @property
    def max_steps(self) -> int | None:
        """The limit of steps."""
        return self.options.limits.max_steps

    @property
    def should_stop(self) -> bool:
        """Whether training ends after the current step; set it to request that, as in Lightning."""
        state, limits = self.state, self.options.limits
        if not state.should_stop or state.stops_at_once:
            return state.should_stop
        return limits.allow_stop(state.current_epoch + state.epoch_done, state.global_step)

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self.request_stop("trainer.should_stop was set")
        else:
            self.state.should_stop = False

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run; None if unknown: data without a length, or only a limit of time."""
        limits, plan = self.options.limits, self.batch_plan
        known = [] if limits.max_steps is None else [limits.max_steps]
        if limits.max_epochs is not None and self.train_feed.num_steps_in(0) is not None:
            total, last = 0, limits.max_epochs
            for first, _ in reversed(((0, 0), *plan.later)):  # each stretch of epochs of one accumulation
                total += max(0, last - first) * (self.train_feed.num_steps_in(first) or 0)
                last = min(last, first)
            known.append(total)
        return min(known, default=None)

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the whole run, for schedules.

        Raises:
            ConfigError: the number is unknown: the training data has no length, or no number of epochs ends the run, and
                max_steps is not set.
        """
        if (steps := self.total_steps) is None:
            raise ConfigError(
                "The number of steps of the run is not known: the training data has no length, or trainer.max_epochs is "
                "not set. Set trainer.max_steps."
            )
        return steps

    def deal_in_shares(self, shares: Sequence[int]) -> None:
        """Deal the samples of the steps from the next one on in these shares, as trainer.rank_shares. Call it on all ranks."""
        assert isinstance(self.train_feed, MapFeed), "a stream's batches are dealt as they come"
        words = words_of(shares)
        self.train_feed.deal(read_words(words))
        self.batch_plan = replace(self.batch_plan, rank_shares=words)

    def request_stop(self, reason: str, at_once: bool = False) -> None:
        """End training after the current step, but not before min_epochs and min_steps, unless `at_once` is true.

        Call it on all ranks at the same step.
        """
        is_new = not self.state.should_stop
        self.state.request_stop(reason, at_once)
        if is_new and not self.should_stop:
            limits = self.options.limits
            least = [f"{name}={value}" for name in ("min_epochs", "min_steps") if (value := getattr(limits, name))]
            self.say(f"A stop is requested ({reason}); training continues until trainer.{' and trainer.'.join(least)}.")

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.engine.ranks.is_main:
            info(text)

    def log_metrics(self, values: dict[str, float]) -> None:
        """Hand values of this step to the loggers, without those that were logged with `logger=False`."""
        if hidden := self.hooks.log.hidden:
            values = {name: value for name, value in values.items() if name.partition("/dataloader_idx_")[0] not in hidden}
        self.hooks("on_metrics", values, self.global_step)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint folder (or fsspec URL), and wait for it. Call it on all ranks."""
        text = str(filepath) if "://" in str(filepath) else str(Path(filepath).absolute())
        place, _, name = text.rpartition("/")
        self.checkpoints.save(make_store(place), name, weights_only)
        self.checkpoints.finish()

    def drop_parts(self) -> None:
        """Free the parts of a fit: an elastic run builds them again."""
        for name in ("train_feed", "optimizers", "rates", "step", "evaluator", "stopping"):
            setattr(self, name, _NotThereYet(name))
        self.reload = None


def keep_values(run: Run, values: Mapping[str, float]) -> None:
    """Make the values of an epoch known to callbacks and schedules."""
    run.callback_metrics.put(values, run.global_step)
    run.state.epoch_values.update(values)
