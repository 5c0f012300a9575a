"""What a run that is planned writes: checkpoints, and copies in other hosts' memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from trainkit.api.callback import Callback
from trainkit.arguments import seconds_of
from trainkit.callbacks import Elastic, ModelCheckpoint
from trainkit.console import plural
from trainkit.extensions.plan.plan import Rows, Sizes, bytes_of, nth
from trainkit.extensions.reports.grid import human
from trainkit.run.run import Run


def checkpoint_rows(run: Run, callbacks: Sequence[Callback], sizes: Sizes) -> Rows:
    """Return when checkpoints are written, their size, and how many are retained."""
    rows: Rows = []
    total = run.total_steps
    epochs = run.options.limits.max_epochs
    for keeper in (c for c in callbacks if isinstance(c, ModelCheckpoint)):
        when = []
        if keeper.every_n_epochs:
            count = "" if epochs is None else f" ({epochs // keeper.every_n_epochs} in all)"
            when.append(f"each {nth(keeper.every_n_epochs)}epoch{count}")
        if keeper.every_n_train_steps:
            count = "" if total is None else f" ({total // keeper.every_n_train_steps} in all)"
            when.append(f"each {keeper.every_n_train_steps} steps{count}")
        if keeper.train_time_interval is not None:
            when.append(f"each {timedelta(seconds=seconds_of(keeper.train_time_interval))}")
        if keeper.save_last:
            when.append("at the end")
        adapters = run.task._layers_of is not None  # they alone are saved
        weights = bytes_of([*run.task.state_dict().values()]) if adapters else sizes.weights
        size = weights
        if not keeper.save_weights_only:
            size += sizes.optimizer + sizes.averages
        rows.append(("checkpoints", f"{', '.join(when)}: {human(size)} each, {_retained(keeper)}"))
    return rows or [("checkpoints", "none")]


def _retained(keeper: ModelCheckpoint) -> str:
    """Return how many checkpoints are retained."""
    if keeper.save_top_k == -1:
        return "all retained"
    if keeper.save_top_k == 0:
        return "the newest retained"
    by = f" by {keeper.monitor} ({keeper.mode})" if keeper.monitor else ""
    newest = " and the newest" if keeper.monitor and keeper.save_last else ""
    return f"{keeper.save_top_k} retained{by}{newest}"


def copy_rows(callbacks: Sequence[Callback], sizes: Sizes, engine: str, parts: int) -> Rows:
    """Return what copies in other hosts' memory cost (callbacks.elastic.copies).

    Args:
        engine: its name.
        parts: ranks that split weights and optimizer state.
    """
    elastic = next((c for c in callbacks if isinstance(c, Elastic) and c.copies), None)
    if elastic is None:
        return []
    if engine != "fsdp":
        return [("copies", f"refused: each rank of engine={engine} holds all state")]
    every, copies = elastic.commit_every_n_steps, elastic.copies
    part = (sizes.weights + sizes.optimizer) // parts
    sent = part * copies
    held = part * (1 + copies)
    return [
        (
            "copies",
            (
                f"each {plural(every, 'step')} {human(sent)} of a rank to"
                f" {'another host' if copies == 1 else f'{copies} other hosts'},"
                f" {human(sent // every)} a step on average"
            ),
        ),
        (
            "memory of a host",
            (
                f"{human(part + held)} for each of its ranks: {human(part)} to copy from, and"
                f" {human(held)} held; {human(part + 2 * held)} while a copy is under way"
            ),
        ),
    ]
