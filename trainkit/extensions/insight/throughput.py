"""ThroughputMonitor: samples per second, the spread of step times, waiting times,
and the device's utilization.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.modules.conv import _ConvNd

from trainkit.api.callback import Callback
from trainkit.api.view import RunView, step_clock_of
from trainkit.arguments import PositiveFloat, PositiveInt, checked
from trainkit.device.sync_guard import allowed_read
from trainkit.errors import TaskError
from trainkit.extensions.insight.log_steps import is_log_step, write
from trainkit.extensions.insight.model_summary.layers import flop_counter
from trainkit.extensions.insight.own_parts import OwnParts
from trainkit.extensions.insight.peak_flops import peak_flops_of

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from trainkit.api.task import Task
    from trainkit.callbacks.step_clock import Times

_PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}


@dataclass(frozen=True)
class _Mark:
    seconds: float
    seen: int  # samples, as trainkit counts them
    samples: int
    items: int
    times: Times


@checked
class ThroughputMonitor(Callback):
    """Logs every log_every_n_steps, over the last `window_size` steps (without validations and the
    first step):

        throughput/samples_per_s       of all ranks
        throughput/items_per_s         of all ranks, with a `length_fn`
        throughput/step_ms_p50, ...    percentiles (p50, p90, p99, max) of rank 0's steps, by the host's clock
        throughput/data_share          share of a step spent waiting for data; communication_share: for the other ranks
        throughput/tflops              TFLOP/s of rank 0, if the FLOPs of a sample are known;
                                       of its own part, if ranks share a model
        throughput/mfu                 tflops as a fraction of the device's peak, if that is known too

    The FLOPs of a sample are counted while the first microbatch trains, forward and backward, by
    torch's FlopCounterMode (matrix products, convolutions, attention); nothing runs twice, so the
    run stays bit-identical. Of a pipeline's microbatches, which are under way at once, all that
    begin before the first one ends are counted. Recomputation by activation checkpointing is
    counted too. Under torch.compile operators are invisible: give `flops_per_sample`.

    Args:
        batch_size_fn: returns the number of samples of a batch. Default: trainkit's own count.
        length_fn: returns the number of items (tokens, say) of a batch.
        window_size: number of steps averaged over.
        flops_per_sample: FLOPs of forward and backward of the whole model, in place of counting;
            of a sample as `batch_size_fn` counts them.
        peak_flops: peak FLOP/s of one rank's device. Default: from a table of GPUs by name and
            precision, the vendors' figures for dense matrices; none on the CPU.
    """

    config_key = "callbacks.throughput"
    uses_step_clock = True

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        window_size: PositiveInt = 100,
        flops_per_sample: PositiveFloat | None = None,
        peak_flops: PositiveFloat | None = None,
    ) -> None:
        self.batch_size_fn = batch_size_fn
        self.length_fn = length_fn
        self.window_size = window_size
        self.flops_per_sample = flops_per_sample
        self.peak_flops = peak_flops
        self._counter: FlopCounterMode | None = None
        self._counting = contextlib.ExitStack()
        self._forget()

    def _forget(self) -> None:
        self._marks: deque[_Mark] = deque()
        self._samples = self._items = 0
        self._paused = 0.0
        self._paused_at = 0.0
        self._counted: float | None = None
        # microbatches that have begun and not ended while FLOPs are counted, and samples of those
        # that have ended
        self._open = self._counted_samples = 0

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Reset, and look up the device's peak."""
        self._forget()
        self._has_stages = trainer.engine.ranks.pipeline_size > 1
        numerics = trainer.options.numerics
        device = trainer.engine.device
        self._counts = (
            self.flops_per_sample is None and not numerics.compile and trainer.is_global_zero
        )
        self._peak = self.peak_flops
        if self._peak is None and device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            precision = numerics.precision
            convolves = any(isinstance(module, _ConvNd) for module in task.modules())
            self._peak = peak_flops_of(name, precision, convolves=convolves)
            if self._peak is None:
                trainer.say(
                    f"No MFU: the peak of {name} at {precision} is unknown. Give"
                    f" {self.config_key}.peak_flops."
                )
        if numerics.compile and self.flops_per_sample is None:
            trainer.say(
                "No MFU: FLOPs cannot be counted under trainer.compile. Give"
                f" {self.config_key}.flops_per_sample."
            )

    def on_train_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch's samples and items; start to count FLOPs at the first batch."""
        if not self._has_stages:
            self._stop_counting()  # an earlier attempt at this batch failed and is repeated
        self._samples += _number(self.batch_size_fn, "batch_size_fn", batch)
        self._items += _number(self.length_fn, "length_fn", batch)
        if self._counts and self._counted is None:
            if self._counter is None:
                self._counter = self._counting.enter_context(flop_counter())
                self._own_parts = self._counting.enter_context(OwnParts(self._counter))
            self._open += 1

    def on_after_backward(self, trainer: RunView, task: Task) -> None:
        """Count the FLOPs of forward and backward, without the update's."""
        if task.automatic_optimization:
            self._count(task)

    def on_train_batch_end(
        self, trainer: RunView, task: Task, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._has_stages:
            self._count(task)

    def _count(self, task: Task) -> None:
        if self._counter is not None:
            target = task._log_target
            assert target is not None, "the loop has set it"
            self._counted_samples += target.num_samples
            self._open -= 1
            if not self._open:
                samples = self._counted_samples
                self._counted = self._stop_counting() / samples

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        """Set the first mark at the first step's end; log when due."""
        if self._has_stages:
            self._stop_counting()  # a microbatch failed, and was repeated
        if self._marks and not is_log_step(trainer):
            return
        with allowed_read():
            mark = self._mark(trainer)
        while (
            len(self._marks) > 1
            and mark.times.steps - self._marks[1].times.steps >= self.window_size
        ):
            self._marks.popleft()
        if self._marks:
            write(trainer, self._values(trainer, self._marks[0], mark))
        self._marks.append(mark)

    def on_validation_start(self, trainer: RunView, task: Task) -> None:
        self._paused_at = time.perf_counter()

    def on_validation_end(self, trainer: RunView, task: Task) -> None:
        self._paused += time.perf_counter() - self._paused_at

    def on_exception(self, trainer: RunView, task: Task, exception: BaseException) -> None:
        self._stop_counting()

    def _stop_counting(self) -> int:
        counter = self._counter
        self._counter = None
        self._open = self._counted_samples = 0
        self._counting.close()
        return 0 if counter is None else counter.get_total_flops() - self._own_parts.elsewhere

    def _mark(self, trainer: RunView) -> _Mark:
        engine = trainer.engine
        seen = samples = trainer.state.samples_seen
        items = 0
        if self.batch_size_fn is not None:
            samples = engine.data.sum_number(self._samples)
        if self.length_fn is not None:
            items = engine.data.sum_number(self._items)
        # waits for the device, so that the time fits the samples
        times = step_clock_of(trainer).read()
        return _Mark(time.perf_counter() - self._paused, seen, samples, items, times)

    def _values(self, trainer: RunView, before: _Mark, now: _Mark) -> dict[str, float]:
        seconds = max(1e-9, now.seconds - before.seconds)
        rate = (now.samples - before.samples) / seconds
        values = {"samples_per_s": rate}
        if self.length_fn is not None:
            values["items_per_s"] = (now.items - before.items) / seconds
        num_steps = now.times.steps - before.times.steps
        values |= percentiles(list(step_clock_of(trainer).durations)[-num_steps:])
        parts = (now.times - before.times).seconds
        total = max(1e-9, sum(parts.values()))
        values |= {f"{part}_share": parts[part] / total for part in ("data", "communication")}
        flops, ranks = self.flops_per_sample, trainer.world_size
        if flops is None:
            # rank 0's own, of all samples that the ranks of its model read, as trainkit counts them
            flops, ranks = self._counted, trainer.engine.ranks.data_size
            rate = (now.seen - before.seen) / seconds
        if flops:
            each = flops * rate / ranks
            values["tflops"] = each / 1e12
            if self._peak is not None:
                values["mfu"] = each / self._peak
        return {f"throughput/{name}": value for name, value in values.items()}


def percentiles(durations: Sequence[float]) -> dict[str, float]:
    """Return step_ms_p50, p90, p99 and max of durations in seconds; empty if there are none."""
    if not durations:
        return {}
    values = np.percentile(np.asarray(durations) * 1000, list(_PERCENTILES.values()))
    return {
        f"step_ms_{name}": float(value) for name, value in zip(_PERCENTILES, values, strict=True)
    }


def _number(function: Callable[[Any], int] | None, name: str, batch: Any) -> int:
    if function is None:
        return 0
    number = function(batch)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise TaskError(
            f"{ThroughputMonitor.config_key}.{name} returned {number!r} ({type(number).__name__});"
            " it must be an int, not a tensor, 0 or more: take it from a shape, or len()."
        )
    return number
