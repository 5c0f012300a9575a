"""Validation, test and prediction: each sample once, on whatever number of ranks.

Ranks take disjoint shares; a rank may have a batch more or none, but all go through the same rounds. But for the pulse,
about once a second, no collective runs between batches: nobody waits for anybody before the end, where one gather
combines the logged values exactly.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from trainkit.api.dispatch import Hooks
from trainkit.api.task import LogTarget, Task
from trainkit.data.feed import Feed
from trainkit.device.precision import Precision
from trainkit.engine.base import Engine
from trainkit.metrics.log import MetricLog

_STEPS = {"validation": "validation_step", "test": "test_step"}


def evaluate(
    kind: Literal["validation", "test"],
    task: Task,
    feeds: Sequence[Feed],
    engine: Engine,
    precision: Precision,
    hooks: Hooks,
    pulse: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], set[str]]:
    """Run `validation_step` or `test_step` over all feeds; call `pulse` in each round, at the same one on all ranks.

    Returns:
        The logged values over all samples of all ranks, on all ranks; and the names meant for the progress bar.
    """
    with _eval_mode(task):
        return _evaluate(kind, task, feeds, engine, precision, hooks, pulse)


@contextlib.contextmanager
def _eval_mode(task: Task) -> Iterator[None]:
    """Put all modules into eval mode, and back into the mode that each was in: a part that the user set to eval() stays so."""
    modes = [(module, module.training) for module in task.modules()]
    task.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _evaluate(
    kind: str,
    task: Task,
    feeds: Sequence[Feed],
    engine: Engine,
    precision: Precision,
    hooks: Hooks,
    pulse: Callable[[], None],
) -> tuple[dict[str, float], set[str]]:
    hooks(f"on_{kind}_start")
    step = getattr(task, _STEPS[kind])
    takes_index = "dataloader_idx" in inspect.signature(step).parameters
    metrics: dict[str, float] = {}
    prog_bar: set[str] = set()
    for index, feed in enumerate(feeds):
        table = MetricLog(f"/dataloader_idx_{index}" if len(feeds) > 1 else "")
        table.new_step(is_read=False)  # there is no axis for an evaluation's steps
        batch_idx = 0
        # no_grad, not inference_mode: what a model keeps from here (a table of positions) must be good for training too.
        with torch.no_grad(), precision.autocast():
            for batch, num_samples, _ in _batches(feed, pulse):
                task._log_to(LogTarget(table, num_samples, on_step=False, on_epoch=True))
                hooks(f"on_{kind}_batch_start", batch, batch_idx, index)
                outputs = step(batch, batch_idx, dataloader_idx=index) if takes_index else step(batch, batch_idx)
                hooks(f"on_{kind}_batch_end", outputs, batch, batch_idx, index)
                batch_idx += 1
        task._log_to(None)
        metrics |= table.epoch_values(engine.comm.all_gather_object)
        prog_bar |= table.prog_bar
    return metrics, prog_bar


def predict(task: Task, feed: Feed, precision: Precision, hooks: Hooks) -> Iterator[tuple[range | None, Any]]:
    """Yield (places in the data set, what `predict_step` returned) for each batch of this rank."""
    hooks("on_predict_start")
    with _eval_mode(task), torch.no_grad(), precision.autocast():
        for batch_idx, (batch, _, places) in enumerate(_batches(feed)):
            hooks("on_predict_batch_start", batch, batch_idx, 0)
            outputs = task.predict_step(batch, batch_idx)
            hooks("on_predict_batch_end", outputs, batch, batch_idx, 0)
            yield places, outputs
    hooks("on_predict_end")


def _batches(feed: Feed, pulse: Callable[[], None] = lambda: None) -> Iterator[tuple[Any, int, range | None]]:
    for step in feed.steps(epoch=0):
        for microbatch in step.microbatches:
            yield microbatch.batch, microbatch.num_samples, microbatch.places
        pulse()
