"""find workers: loader workers and prefetch, measured on the training itself."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from trainkit.api.options import Options
from trainkit.api.task import Task
from trainkit.callbacks.step_clock import StepClock
from trainkit.data.splitting import loader_like
from trainkit.extensions.find.trial_run import measured, trial_run, trial_task
from trainkit.extensions.script.loaders import ChangedLoader
from trainkit.run.data_sources import DataSources

_WARM_STEPS = 2  # workers start, and load ahead
_PREFETCH = (2, 4, 8)  # batches that a worker loads ahead; torch's default is the first
_ENOUGH = 0.95  # of the best speed
_MOST_S = 8.0  # for the steps of a setting


@dataclass(frozen=True)
class Loading:
    """What a setting gives.

    Attributes:
        workers: loader processes of each rank.
        prefetch: batches that each of them loads ahead; 0 without workers.
        samples_per_s: of all ranks.
        data_share: the part of a step that a rank waits for data, of the rank that waits longest.
    """

    workers: int
    prefetch: int
    samples_per_s: float
    data_share: float

    @property
    def is_fed(self) -> bool:
        """Whether so little is left to wait for that no setting is
        faster by more than a twentieth.
        """
        return self.data_share <= 1 - _ENOUGH


def _with_workers(loader: DataLoader[Any], workers: int, prefetch: int) -> DataLoader[Any]:
    """Return a loader with other workers."""
    changes: dict[str, Any] = {
        "num_workers": workers,
        "batch_sampler": loader.batch_sampler,
        "prefetch_factor": prefetch if workers else None,
        "persistent_workers": loader.persistent_workers and workers > 0,
    }
    # they are for workers
    changes |= {} if workers else {"multiprocessing_context": None, "timeout": 0}
    return loader_like(loader, loader.dataset, **changes)


def find_workers(
    task: Task, data: DataSources, options: Options, steps: int = 20, most: int | None = None
) -> tuple[list[Loading], int]:
    """Train copies of the task for some steps at each number of workers, then at more prefetch for
    the best one.

    Call it on all ranks; all measure the same settings. It stops at a setting whose ranks wait for
    data for a twentieth of a step or less: no other could be faster by more than that.

    Args:
        task: the Task; copies of it are trained.
        data: of the fit.
        options: of its Trainer.
        steps: measured for each setting at most, after two; 1 or more. Fewer, but three, if they
            take longer than 8 s.
        most: workers of a rank at most. Default: its share of its host's cores, the smallest of all
            ranks.

    Returns:
        The settings in the order of trials; the number of ranks.

    Raises:
        ConfigError: the training data comes from no DataLoader, or is a stream.
    """

    ranks = 1

    def measure(workers: int, prefetch: int) -> Loading:
        nonlocal most, ranks
        change = partial(_with_workers, workers=workers, prefetch=prefetch)
        chosen = ChangedLoader(data.given, data.datamodule, change)
        with trial_run(trial_task(task), chosen, options, [clock := StepClock()]) as run:
            times, samples = measured(run, clock, _WARM_STEPS, steps, _MOST_S)
            share = len(os.sched_getaffinity(0)) // run.engine.ranks.local_size
            seen = run.engine.comm.all_gather_object(
                (times.step_s, times.per_step()["data"], max(1, share))
            )
        most = min(cores for _, _, cores in seen) if most is None else most
        ranks = len(seen)
        longest = max(step_s for step_s, _, _ in seen)
        waits = max(data_s / step_s for step_s, data_s, _ in seen)
        return Loading(workers, prefetch, samples / times.steps / longest, waits)

    tried = [measure(0, 0)]
    assert most is not None, "the first measurement sets it"
    for count in _counts(most):
        if tried[-1].is_fed:
            break
        tried.append(measure(count, _PREFETCH[0]))
    chosen = enough(tried)
    if chosen.workers and not chosen.is_fed:
        tried += [measure(chosen.workers, prefetch) for prefetch in _PREFETCH[1:]]
    return tried, ranks


def _counts(most: int) -> list[int]:
    """Return 1, 2, 4, ... and the largest number."""
    return [
        *itertools.takewhile(lambda count: count < most, (2**i for i in range(12))),
        *([most] if most else []),
    ]


def enough(tried: Sequence[Loading]) -> Loading:
    """Return the setting with the fewest workers, then the least prefetch,
    that is within a twentieth of the fastest.
    """
    best = max(one.samples_per_s for one in tried)
    return min(
        (one for one in tried if one.samples_per_s >= _ENOUGH * best),
        key=lambda one: (one.workers, one.prefetch),
    )
