"""Evaluator: sanity check, validation, test and prediction; each sample once, on any number of
ranks.

    validate        inside a fit: rank 0's buffers to all ranks -> evaluate -> hooks
    sanity_check    a few validation batches before training
    evaluate        one pass over the feeds; a gather at its end combines the logged values exactly
    predict         one pass over one feed

Ranks take disjoint shares; a rank may have a batch more or none, but all run the same rounds.
Except for the coordinator's exchange, about twice a second inside a fit, no collective runs between
batches.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from trainkit.api.dispatch import Hooks
from trainkit.api.step_call import call_step
from trainkit.api.task import LogTarget, Task
from trainkit.api.view import RunView
from trainkit.checkpoint.stateful import random_state, set_random_state
from trainkit.data.feed import Feed, MapFeed, Microbatch
from trainkit.device.transfer import to_device
from trainkit.errors import ConfigError, TaskError
from trainkit.metrics.log import MetricLog
from trainkit.metrics.objects import EpochMetrics, metrics_in, remember
from trainkit.run.prediction_table import PredictionTable, TableFormat, check_format, merge
from trainkit.run.predictions import clear_predictions, write_prediction

Kind = Literal["validation", "test"]
_TWICE = (
    "log('{}', ...) of one loader is the name of another loader's value too, which it would replace."
    " Leave add_dataloader_idx out, or log under a name for each."
)
_STEPS = {"validation": "validation_step", "test": "test_step"}


@dataclass(frozen=True)
class ValidationData:
    """The validation data of a fit.

    Attributes:
        feeds: one for each loader.
        sanity_feeds: returns feeds of a number of batches of the same data, None for all.
        training_names: returns the names that training logs for the progress bar.
        check: called in each round, the same one on all ranks; may end the run.
    """

    feeds: Sequence[Feed]
    sanity_feeds: Callable[[int | None], list[Feed]]
    training_names: Callable[[], set[str]] = set
    check: Callable[[], None] = lambda: None


def steps_between(val_check_interval: float | None, num_steps: int | None) -> int | None:
    """Return the steps between two validations inside an epoch of `num_steps`; None to validate at
    its end.

    Raises:
        ConfigError: it is a share of an epoch of unknown length.
    """
    if val_check_interval is None or (
        isinstance(val_check_interval, float) and val_check_interval == 1
    ):
        return None
    if isinstance(val_check_interval, int):
        return val_check_interval
    if num_steps is None:
        raise ConfigError(
            f"trainer.val_check_interval is {val_check_interval}, a share of an epoch, but the"
            " training data is a stream without a length. Give a number of steps."
        )
    return max(1, int(num_steps * val_check_interval))


class Evaluator:
    """See the module.

    Attributes:
        data: of validation inside a fit.
        num_validations: validations that have run; a part of the checkpoint.
        names: names of the values that validation logged.
        num_batches: batches of this rank in the evaluation in progress, if known.
    """

    def __init__(
        self, run: RunView, task: Task, hooks: Hooks, data: ValidationData | None = None
    ) -> None:
        self._run = run
        self._task = task
        self._hooks = hooks
        self.data = data or ValidationData([], lambda limit: [])
        self._own_names, self.names = set[str](), set[str]()
        self._of_hooks: dict[str, float] = {}
        self.interval: int | None = None  # steps between two validations inside the present epoch
        self.num_validations = 0
        self.num_batches: int | None = None
        self._current: tuple[Feed, Microbatch] | None = None

    @property
    def dataset(self) -> Any:
        """The data set of the batch that is evaluated; None for a stream."""
        return None if self._current is None else _dataset_of(self._current[0])

    def sample_indices(self) -> list[int] | None:
        """Return the data set's indices of the samples of the batch that is evaluated;
        None for a stream.
        """
        return None if self._current is None else self._current[0].indices(0, self._current[1])

    def state_dict(self) -> int:
        """Return the number of validations."""
        return self.num_validations

    def load_state_dict(self, state: int) -> None:
        """Restore it."""
        self.num_validations = state

    @property
    def has_data(self) -> bool:
        """Whether a fit has validation data."""
        return bool(self.data.feeds)

    @property
    def is_awaited(self) -> bool:
        """Whether there is validation data, and no validation has run yet."""
        return self.has_data and self.num_validations == 0

    @property
    def prog_bar_names(self) -> set[str]:
        """Names of the values for the progress bar."""
        return self.data.training_names() | self._own_names | self._hooks.log.prog_bar

    # -- inside a fit -----------------------------------------------------------------------------------------------

    def sanity_check(self) -> None:
        """Try a few validation batches before training:
        an error in validation then costs no epoch.
        """
        limit, state = self._run.options.evaluation.num_sanity_val_steps, self._run.state
        if not self.has_data or limit == 0 or state.global_step:
            return
        self._hooks("on_sanity_check_start")
        state.phase = "sanity_check"
        feeds = self.data.sanity_feeds(limit)
        try:
            with evaluating(self._task):
                self._pass("validation", feeds, lambda: None)
                self._hooks("on_validation_end")
        finally:
            for feed in feeds:  # their workers need not live as long as the run
                feed.close()
        self._run.callback_metrics.clear()  # those were of a few batches
        self._run.callback_metrics.logged_at.clear()
        state.phase = "fit"
        self._hooks("on_sanity_check_end")

    def validate(self, is_due: bool = True) -> Mapping[str, float]:
        """Validate inside a fit and return the logged values; empty without validation data.

        Args:
            is_due: whether a longer run has this validation; if not, its random numbers are not of
                those that a checkpoint continues.
        """
        # all ranks evaluate, and save, the same weights
        (run := self._run).engine.approximation.close_round()
        if not self.has_data:
            return {}
        self._run.state.is_validating = True
        before = None if is_due else random_state()
        try:
            # rank 0's statistics are evaluated and saved
            run.engine.send_buffers(self._task)
            with evaluating(self._task):
                # a signal during the validation saves the state as of here
                with run.checkpoints.holding_rank_parts():
                    run.coordinator.expect_new_pace()
                    self._count(self.data.feeds)
                    metrics = self._pass("validation", self.data.feeds, self.data.check)
                if before:
                    set_random_state(before)
                run.coordinator.expect_new_pace()
                self.num_validations += 1
                self.names |= metrics.keys() | self._of_hooks.keys()
                run.log_metrics(metrics)
                self._end_hook("on_validation_end")
            self.names |= self._of_hooks.keys()
            return metrics | self._of_hooks
        finally:
            self._run.state.is_validating = False

    # -- entry points of their own ----------------------------------------------------------------------------------

    def evaluate(self, kind: Kind, feeds: Sequence[Feed]) -> dict[str, float]:
        """Evaluate; return the logged values over all samples of all ranks, on all ranks."""
        self._count(feeds)
        with evaluating(self._task):
            metrics = self._pass(kind, feeds, lambda: None)
            self._run.log_metrics(metrics)
            self._end_hook(f"on_{kind}_end")
        return metrics | self._of_hooks

    def predict(
        self, feeds: Sequence[Feed], write_to: Path | None, keep: bool, table: TableFormat = "csv"
    ) -> list[Any] | None:
        """Predict on one feed, and write each batch;
        return all ranks' outputs in the data's order, or None unless `keep`.
        """
        check_format(table)
        if len(feeds) > 1:
            raise ConfigError(
                f"predict takes one loader, and got {len(feeds)}. Call it once for each."
            )
        self._count(feeds)
        engine = self._run.engine
        if write_to is not None:
            engine.comm.run_on_main(lambda: clear_predictions(write_to))
        own, folder = list[tuple[int, Any]](), write_to if engine.ranks.counts_samples else None
        with contextlib.ExitStack() as stack:
            rows = (
                None
                if folder is None
                else PredictionTable(folder, engine.ranks.rank, _dataset_of(feeds[0]))
            )
            stack.callback(lambda: None if rows is None else rows.close())
            for i, (microbatch, outputs) in enumerate(self._predictions(feeds[0])):
                places, on_cpu = microbatch.places, to_device(outputs, torch.device("cpu"))
                place = i if places is None else places.start
                if folder is not None and rows is not None:
                    write_prediction(folder, place, engine.ranks.rank, on_cpu)
                    rows.add(place, feeds[0].indices(0, microbatch), microbatch.batch, on_cpu)
                if keep:
                    own.append((place, on_cpu))
        if write_to is not None:
            engine.comm.barrier()  # all ranks' rows are there
            engine.comm.run_on_main(lambda: merge(write_to, table))
        if not keep:
            engine.comm.barrier()  # all files are there
            return None
        try:
            of_ranks = engine.data.all_gather_object(own)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TaskError(_NOT_SENT.format(type(self._task).__name__, error)) from error
        pairs = [pair for rank in of_ranks for pair in rank]
        return [outputs for _, outputs in sorted(pairs, key=lambda pair: pair[0])]

    # -- one pass ---------------------------------------------------------------------------------------------------

    def _count(self, feeds: Sequence[Feed]) -> None:
        counts = [feed.num_steps_in(0) for feed in feeds]
        self.num_batches = None if None in counts else sum(filter(None, counts))

    def _pass(
        self, kind: str, feeds: Sequence[Feed], check: Callable[[], None]
    ) -> dict[str, float]:
        self._hooks(f"on_{kind}_start")
        self._hooks(f"on_{kind}_epoch_start")
        objects = EpochMetrics(self._task)
        objects.begin()
        name, metrics = _STEPS[kind], dict[str, float]()
        takes_index = "dataloader_idx" in inspect.signature(getattr(self._task, name)).parameters
        for index, feed in enumerate(feeds):
            more = (index,) * takes_index
            suffix = feed.name or f"dataloader_idx_{index}"
            log = MetricLog(f"/{suffix}" if len(feeds) > 1 else "")
            log.new_step(is_read=False)  # an evaluation logs no steps
            for batch_idx, microbatch in enumerate(_batches(feed, check)):
                batch = microbatch.batch
                self._current = (feed, microbatch)
                if not microbatch.num_samples:
                    with uncounted(self._task, evaluates=True):
                        self._step(name, batch, batch_idx, *more)
                    continue
                self._task._log_to(
                    LogTarget(log, microbatch.num_samples, on_step=False, on_epoch=True)
                )
                self._hooks(f"on_{kind}_batch_start", batch, batch_idx, index)
                outputs = self._step(name, batch, batch_idx, *more)
                self._hooks(f"on_{kind}_batch_end", outputs, batch, batch_idx, index)
            self._task._log_to(None)
            finished = objects if index == len(feeds) - 1 else None
            gather = self._run.engine.data.all_gather_object
            values = log.epoch_values(gather, objects=finished)
            if twice := metrics.keys() & values.keys():
                raise TaskError(_TWICE.format(min(twice)))
            metrics |= values
            if self._run.state.phase == "fit":
                self._own_names |= log.prog_bar
        self._run.callback_metrics.put(metrics, self._run.global_step)  # hooks read them
        self._of_hooks = {}
        self._end_hook(f"on_{kind}_epoch_end")
        self._hooks.log.objects = objects  # finished once on_..._end has run
        return metrics

    def _step(self, name: str, *arguments: Any) -> Any:
        with self._run.precision.autocast():  # hooks, and those of a transfer, are not in it
            return call_step(self._task, name, *arguments)

    def _end_hook(self, name: str) -> None:
        """Call a hook, and remember what it logs: it is written already."""
        self._hooks(name)
        self._of_hooks |= self._hooks.log.latest

    def _predictions(self, feed: Feed) -> Iterator[tuple[Microbatch, Any]]:
        """Yield (microbatch, outputs of `predict_step`) for each batch of this rank."""
        with evaluating(self._task):
            self._hooks("on_predict_start")
            self._hooks("on_predict_epoch_start")
            for batch_idx, microbatch in enumerate(_batches(feed, lambda: None)):
                batch = microbatch.batch
                self._current = (feed, microbatch)
                if not microbatch.num_samples:
                    with uncounted(self._task):
                        self._step("predict_step", batch, batch_idx)
                    continue
                self._hooks("on_predict_batch_start", batch, batch_idx, 0)
                outputs = self._step("predict_step", batch, batch_idx)
                self._hooks("on_predict_batch_end", outputs, batch, batch_idx, 0)
                yield microbatch, outputs
            self._hooks("on_predict_epoch_end")
            self._hooks("on_predict_end")


_NOT_SENT = (
    "{}.predict_step returned what cannot be sent to the other ranks ({}). Return tensors, numbers,"
    " or dicts and lists of them; or pass return_predictions=False, and write them in a"
    " BasePredictionWriter."
)


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within the context there are no gradients, and all modules are in eval mode; then restore the
    mode of each: a part that the user set to eval() stays so.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        # no_grad, not inference_mode: a table that a model caches from here must be good for
        # training too
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def uncounted(task: Task, evaluates: bool = False) -> Iterator[None]:
    """Drop what the Task logs in the context, a step's values or those of an evaluation, and what
    its metric objects count: the samples are borrowed (data/plan.py).
    """
    undo = remember(metrics_in(task))
    task._log_to(LogTarget(MetricLog(), 1, on_step=not evaluates, on_epoch=evaluates))
    try:
        yield
    finally:
        task._log_to(None)
        undo()


def _batches(feed: Feed, check: Callable[[], None]) -> Iterator[Microbatch]:
    for step in feed.steps(epoch=0):
        yield from step.microbatches
        check()


def _dataset_of(feed: Feed) -> Any:
    return feed.source.dataset if isinstance(feed, MapFeed) else None
