"""Run: one fit, validate, test or predict; what the loop works with, and what hooks receive as
`trainer`.

It is one object from `setup` on, since hooks and the Task may store it. So a fit reaches it in
three steps, each whole:

    Run(...)    the stage (setup.py) has an engine and a folder: counters, hooks, checkpoints, evaluator
    train_on    the data and the plan of batches, which configure_optimizers may ask for
    begin       the parts of a fit, which build.py has made

No other file assigns to it. Hooks see it as api/view.py's RunView.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trainkit.api.callback import Callback
from trainkit.api.datamodule import DataModule
from trainkit.api.dispatch import Hooks
from trainkit.api.options import Options
from trainkit.api.state import TrainState
from trainkit.api.task import Task
from trainkit.checkpoint.manager import CheckpointManager
from trainkit.checkpoint.places import make_store
from trainkit.checkpoint.writer import Writer
from trainkit.data.feed import Feed, MapFeed
from trainkit.data.shares import format_shares, parse_shares
from trainkit.device.precision import Precision, precision_of
from trainkit.engine.base import Engine
from trainkit.engine.coordinator import Coordinator
from trainkit.errors import CheckpointError, ConfigError, TaskError
from trainkit.metrics.latest import LatestMetrics
from trainkit.optim.batch_plan import BatchPlan
from trainkit.optim.schedule import LearningRates
from trainkit.run.elastic import ElasticState
from trainkit.run.evaluator import Evaluator
from trainkit.run.folder import stores_of
from trainkit.run.lightning_names import LightningNames
from trainkit.run.logged import hook_log_of
from trainkit.run.saved import difference
from trainkit.run.step_parts import StepParts
from trainkit.run.stopping import Stopping


@dataclass(frozen=True)
class FitParts:
    """The parts of a fit.

    Attributes:
        step: what a training step works with beside the optimizers.
        before_epoch: called with the number of an epoch before its first step.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    rates: LearningRates
    step: StepParts
    stopping: Stopping
    before_epoch: Callable[[int], None]


class _Later:
    """A part that a Run has later: Python looks here only until the Run has it,
    so that it costs the loop nothing.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, run: Any, owner: type) -> Any:
        if run is None:
            return self
        if run.state.phase in ("validate", "test", "predict"):
            raise ConfigError(
                f"trainer.{self._name} is a part of a fit, and this is a run of {run.state.phase}."
            )
        raise ConfigError(
            f"trainer.{self._name} is not there yet: the run is being set up. Use it in"
            " on_fit_start or later."
        )


def _later() -> Any:
    return _Later()


class Run(LightningNames):
    """See the module; the Trainer's docstring explains `options`, RunView the rest.

    Args:
        state: the counters; it names the entry point.
        run_dir: of all ranks.
        coordinator: what all ranks agree on.
        writer: of checkpoints.
        elastic: commits of an elastic fit.
    """

    run_dir: Path
    coordinator: Coordinator
    precision: Precision
    checkpoints: CheckpointManager
    hooks: Hooks
    evaluator: Evaluator
    train_feed: Feed = _later()
    batch_plan: BatchPlan = _later()
    optimizers: Sequence[torch.optim.Optimizer] = _later()
    rates: LearningRates = _later()
    step: StepParts = _later()
    stopping: Stopping = _later()
    before_epoch: Callable[[int], None] = _later()

    def __init__(
        self,
        state: TrainState,
        task: Task,
        options: Options,
        callbacks: Sequence[Callback],
        engine: Engine,
        *,
        run_dir: Path,
        coordinator: Coordinator,
        writer: Writer,
        datamodule: DataModule | None = None,
        elastic: ElasticState | None = None,
    ) -> None:
        self.task = task
        self.options = options
        self.callbacks = list(callbacks)
        self.engine = engine
        self.run_dir = run_dir
        self.coordinator = coordinator
        self.datamodule = datamodule
        self.elastic = elastic
        self.state = state
        self.callback_metrics = LatestMetrics()
        self.precision = precision_of(options.numerics.precision, engine.device)
        self.checkpoints = CheckpointManager(
            engine, stores_of(run_dir, self.callbacks), self.say, writer, difference
        )
        self.hooks = Hooks(self, task, self.callbacks, hook_log_of(self))
        self.evaluator = Evaluator(self, task, self.hooks)

    def train_on(self, feed: Feed, plan: BatchPlan) -> None:
        """Train on these data from the next epoch on."""
        self.train_feed = feed
        self.batch_plan = plan

    def begin(self, parts: FitParts) -> None:
        """Take the parts of a fit."""
        self.optimizers = parts.optimizers
        self.rates = parts.rates
        self.step = parts.step
        self.stopping = parts.stopping
        self.before_epoch = parts.before_epoch

    def end(self) -> None:
        """Free data and parts of a fit: the next attempt of an elastic run makes its own."""
        for name in [name for name, part in vars(Run).items() if isinstance(part, _Later)]:
            vars(self).pop(name, None)

    @property
    def current_epoch(self) -> int:
        """The epoch in progress, from 0."""
        return self.state.current_epoch

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
        """Optimizer steps of the whole run;
        None if unknown: data without a length, or only a limit of time.
        """
        limits, plan = self.options.limits, self.batch_plan
        known = [] if limits.max_steps is None else [limits.max_steps]
        if limits.max_epochs is not None and self.train_feed.num_steps_in(0) is not None:
            total = 0
            last = limits.max_epochs
            # each stretch of epochs of one accumulation
            for first, _ in reversed(((0, 0), *plan.later)):
                total += max(0, last - first) * (self.train_feed.num_steps_in(first) or 0)
                last = min(last, first)
            known.append(total)
        return min(known, default=None)

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the whole run, for schedules; of one epoch if max_epochs is 0.

        Raises:
            ConfigError: the number is unknown: the training data has no length, or no number of
                epochs ends the run, and max_steps is not set.
        """
        if (steps := self.total_steps) is None:
            raise ConfigError(
                "The number of steps of the run is not known: the training data has no length, or"
                " trainer.max_epochs is not set. Set trainer.max_steps."
            )
        return steps or self.train_feed.num_steps_in(0) or 0

    def set_rank_shares(self, shares: Sequence[int]) -> None:
        """Split the samples of the steps from the next one on in these shares,
        as trainer.rank_shares. Call it on all ranks.
        """
        assert isinstance(self.train_feed, MapFeed), "a stream's batches are split as they come"
        text = format_shares(shares)
        self.train_feed.set_shares(parse_shares(text))
        self.batch_plan = replace(self.batch_plan, rank_shares=text)

    def request_stop(self, reason: str, at_once: bool = False) -> None:
        """End training after the current step, but not before min_epochs and min_steps, unless
        `at_once` is true.

        Call it on all ranks at the same step.
        """
        is_new = not self.state.should_stop
        self.state.request_stop(reason, at_once)
        if is_new and not self.should_stop:
            limits = self.options.limits
            least = [
                f"{name}={value}"
                for name in ("min_epochs", "min_steps")
                if (value := getattr(limits, name))
            ]
            self.say(
                f"A stop is requested ({reason}); training continues until"
                f" trainer.{' and trainer.'.join(least)}."
            )

    def say(self, text: str) -> None:
        """Print on rank 0."""
        self.engine.ranks.say(text)

    def log_metrics(self, values: dict[str, float]) -> None:
        """Hand values of this step to the loggers, without those that were logged with
        `logger=False`. One that was logged as "step" is their step, as in Lightning.
        """
        shown = self.hooks.log.shown(values, self.state.stage)
        if not 0 <= (step := shown.pop("step", self.global_step)) < 2**63:
            raise TaskError(f"log('step', ...) is the loggers' step: 0 or more, and not {step}.")
        self.hooks("on_metrics", shown, int(step))

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint folder (or fsspec URL), and wait for it. Call it on all ranks.

        Raises:
            CheckpointError: on all ranks: it could not be written.
        """
        text = str(filepath) if "://" in str(filepath) else str(Path(filepath).absolute())
        place, _, name = text.rpartition("/")
        written = self.checkpoints.save(make_store(place), name, weights_only)
        self.checkpoints.finish()

        def check() -> None:
            if not written.result():
                failure = self.checkpoints.writer.failure
                raise CheckpointError(f"save_checkpoint could not write {failure}")

        self.engine.comm.run_on_main(check)
