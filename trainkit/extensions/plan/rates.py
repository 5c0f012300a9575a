"""The learning rates of a run that is planned, from the real schedulers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from trainkit.api.state import TrainState
from trainkit.extensions.plan.plan import Rows
from trainkit.run.run import Run

_SCHEDULED_AT_MOST = 200_000  # limit for following a schedule: a scheduler can only be stepped


def rate_rows(run: Run) -> Rows:
    """Return the learning rates at the run's milestones, from the real schedulers."""
    total = run.total_steps
    if total is None or total < 1:
        return [
            (
                "",
                (
                    "the number of steps is not known: the training data has no length and"
                    " max_steps is not set"
                ),
            )
        ]
    warm = run.batch_plan.warmup_steps
    names = {0: "first step", total - 1: "last step"} | (
        {warm - 1: "end of warm-up"} if 0 < warm <= total else {}
    )
    names |= {
        total * part // 4: f"{25 * part} %" for part in (1, 2, 3) if total * part // 4 not in names
    }
    rows: Rows = []
    for step, rates in _follow(run, total):
        if step in names:
            shown = ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(rates))
            rows.append((f"step {step:,}", f"{shown}  ({names[step]})"))
    if len(rows) < len(names):
        rows.append(("", f"not followed beyond step {_SCHEDULED_AT_MOST:,}"))
    if any(config.monitor for config in run.rates.schedules):
        rows.append(("", "a scheduler that monitors a value will change these"))
    return rows


def _follow(run: Run, total: int) -> Iterator[tuple[int, list[float]]]:
    """Yield (step, the rate of each group in it); stops at `_SCHEDULED_AT_MOST` steps."""
    rates = run.rates
    feed = run.train_feed
    taken = 0
    epoch = 0
    with warnings.catch_warnings(), _counting(run.state) as state:
        # torch warns that no optimizer has taken a step, which is intended
        warnings.simplefilter("ignore")
        while taken < total:
            rates.start_epoch(epoch, taken)
            steps = feed.num_steps_in(epoch) or total
            for _ in range(min(steps, total - taken)):
                if taken >= _SCHEDULED_AT_MOST:
                    return
                yield taken, rates.current()
                taken += 1
                state.global_step = taken
                rates.after_step(taken)
            epoch += 1
            rates.after_epoch(epoch, taken, {}, complete=False)
            state.current_epoch = epoch


@contextlib.contextmanager
def _counting(state: TrainState) -> Iterator[TrainState]:
    """A context with the run's counters, which a Task's lr_scheduler_step may read, to move."""
    step, epoch = state.global_step, state.current_epoch
    try:
        yield state
    finally:
        state.global_step, state.current_epoch = step, epoch
