"""find batch: the largest microbatch that fits into the memory of every rank,
found by training on it.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainkit import loop
from trainkit.data.feed import MapFeed, Step
from trainkit.device.accelerator import has_streams
from trainkit.errors import ConfigError
from trainkit.extensions.find.trial_run import (
    random_numbers_kept,
    steps_of,
    trial_run,
)
from trainkit.extensions.script.subject import Subject
from trainkit.run.around_fit import RequestedFit
from trainkit.run.batches import compute_gradients
from trainkit.run.rescue import forget_gradients
from trainkit.run.run import Run

_STEPS = 2  # the first one makes the optimizer's state
_GB = 10**9


@dataclass(frozen=True)
class Tried:
    """A microbatch that was trained on.

    Attributes:
        batch_size: samples of a rank's microbatch.
        failed: the ranks on which it did not fit; empty if it fits.
        peak_bytes: the largest peak of a rank; of a GPU torch's allocations, of the CPU the
            process's memory.
    """

    batch_size: int
    failed: tuple[int, ...]
    peak_bytes: int


@dataclass(frozen=True)
class Batches:
    """What was found.

    Attributes:
        tried: each microbatch, in the order of trials.
        largest: that fits on all ranks; None if not one sample does.
        is_limited: whether a larger one was left untried: the data has not enough samples, or
            `most` is reached.
        global_batch: samples of a step of the config, on all ranks.
        ranks: that share them.
    """

    tried: tuple[Tried, ...]
    largest: int | None
    is_limited: bool
    global_batch: int
    ranks: int

    def choice(self) -> tuple[int, int] | None:
        """Return (batch size, accumulation): the largest that fits and keeps the global batch;
        None if none does.
        """
        own = self.global_batch // self.ranks
        sizes = (size for size in range(min(self.largest or 0, own), 0, -1) if own % size == 0)
        size = next(sizes, None)
        return None if size is None else (size, own // size)


def find_batch(subject: Subject, memory_gb: float | None = None, most: int = 65536) -> Batches:
    """Double the microbatch of a fit until it fits no longer, then halve the gap down to a
    sixteenth. Call it on all ranks.

    Each size is trained for two steps of two microbatches, with all ranks; a rank that is out of
    memory ends the trial on all.

    Args:
        subject: the fit.
        memory_gb: memory that a rank may use, in units of 10^9 bytes; of a GPU its own by default.
            On the CPU it must be given: a process that takes all of a host's memory is killed.
        most: no larger microbatch is tried.

    Raises:
        ConfigError: its batch size cannot be changed, or there is no limit on the CPU.
    """
    first = subject.batch_size
    begins = _try(subject, first, memory_gb, looks_only=True)
    most = min(most, begins.room)
    tried: list[Tried] = []

    def fits(size: int) -> bool:
        tried.append(_try(subject, size, memory_gb).tried)
        return not tried[-1].failed

    largest, above = largest_that_fits(fits, min(first, most), most)
    return Batches(tuple(tried), largest, above is None, begins.global_batch, begins.ranks)


def largest_that_fits(
    fits: Callable[[int], bool], first: int, most: int
) -> tuple[int | None, int | None]:
    """Return the largest size that fits, to a sixteenth, and the smallest seen that does not; None
    if there is none.

    Args:
        fits: whether a size does.
        first: the size to begin with.
        most: the largest size to try.
    """
    good = 0
    bad = None
    size = first
    while bad is None and good < most or bad is not None and bad - good > max(1, good // 16):
        if fits(size):
            good = size
        else:
            bad = size
        size = (
            min(2 * size, most) if bad is None else (good + bad) // 2 if good else max(1, bad // 2)
        )
        if bad == 1:
            break
    return good or None, bad


@dataclass(frozen=True)
class _Trial:
    tried: Tried
    room: int  # samples that two microbatches of each rank may have at most, each
    global_batch: int
    ranks: int


def _try(subject: Subject, size: int, memory_gb: float | None, looks_only: bool = False) -> _Trial:
    # two microbatches: the second one's forward meets the first one's gradients
    accumulate = None if looks_only else 2
    with random_numbers_kept():  # making the task draws its first weights
        asked = subject.with_batch_size(size, accumulate)
        return _try_built(asked, size, memory_gb, looks_only)


def _try_built(asked: RequestedFit, size: int, memory_gb: float | None, looks_only: bool) -> _Trial:
    with trial_run(asked.task, asked.data, asked.options, reduces_first=True) as run:
        assert isinstance(run.train_feed, MapFeed), "trial_run refuses streams"
        ranks = run.engine.ranks.data_size
        samples = run.train_feed.source.num_samples
        trial = _Trial(
            Tried(size, (), 0),
            max(1, samples // (2 * ranks)),
            run.batch_plan.global_batch_size or size,
            ranks,
        )
        if looks_only:
            if memory_gb is None and run.engine.device.type == "cpu":
                raise ConfigError(
                    "memory_gb is missing: on the CPU it must be the memory that a rank may use, as"
                    " memory_gb=4."
                )
            return trial
        limit = None if memory_gb is None else round(memory_gb * _GB)
        failed, peak = _train(run, limit)
        outcomes = run.engine.comm.all_gather_object((failed, peak))
    tried = Tried(
        size,
        tuple(rank for rank, (failed, _) in enumerate(outcomes) if failed),
        max(peak for _, peak in outcomes),
    )
    return _Trial(tried, trial.room, trial.global_batch, ranks)


def _train(run: Run, limit: int | None) -> tuple[bool, int]:
    """Take the steps; return whether this rank was out of memory, and its peak.
    All ranks end at the same step.
    """
    gc.collect()
    if run.engine.device.type == "mps":
        raise ConfigError("find batch compares peaks of memory, which torch does not know of mps.")
    peak = _gpu_peak if has_streams(run.engine.device) else _cpu_peak
    peak(run.engine.device, True)
    run.hooks("on_fit_start")
    run.hooks("on_train_start")
    for step in itertools.islice(steps_of(run), _STEPS):
        failed = _out_of_memory(lambda step=step: _compute(run, step))  # type: ignore[misc]
        # on all ranks, also after a failure: the others' sums are in flight
        run.engine.reduce_gradients()
        if run.engine.comm.sum_number(failed):
            forget_gradients(run, run.step.log, run.state.batch_idx)
            return failed, peak(run.engine.device, False)
        failed = _out_of_memory(lambda step=step: _update(run, step))  # type: ignore[misc]
        used = peak(run.engine.device, False)
        failed = failed or (limit is not None and used > limit)
        if run.engine.comm.sum_number(failed):
            return failed, used
    return False, used


def _compute(run: Run, step: Step) -> None:
    compute_gradients(run, step)


def _update(run: Run, step: Step) -> None:
    loop.finish_gradients(run, step)
    numerics = run.options.numerics
    run.step.update(numerics.gradient_clip_val, numerics.gradient_clip_algorithm)
    run.engine.clear_gradients()


def _out_of_memory(work: Callable[[], None]) -> bool:
    try:
        work()
    except torch.OutOfMemoryError:
        return True
    except RuntimeError as error:  # of torch's allocator on the CPU
        if "DefaultCPUAllocator" not in str(error):
            raise
        return True
    return False


def _gpu_peak(device: torch.device, begins: bool) -> int:
    of_kind: Any = torch.get_device_module(device)
    if begins:
        of_kind.empty_cache()
        of_kind.reset_peak_memory_stats(device)
    return int(of_kind.max_memory_reserved(device))


def _cpu_peak(device: torch.device, begins: bool) -> int:
    """Return the peak of this process's memory since it `begins`; see proc(5), clear_refs."""
    if begins:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
