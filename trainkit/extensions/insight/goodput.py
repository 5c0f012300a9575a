"""Goodput: the share of a run's time spent on steps that count,
over all its restarts and changes of ranks.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import checked
from trainkit.console import plural, show_table, try_to_write
from trainkit.data.feed import StreamFeed
from trainkit.launch.environment import job_started
from trainkit.launch.moments import Moment
from trainkit.safety.whole_files import replacing

FILE = "goodput.json"
PARTS = {
    "steps": "steps that count",
    "repeating": "repeating lost steps",
    "data": "waiting for data",
    "validating": "validating",
    "saving": "saving: checkpoints and commits, the part that training waits for",
    "recovering": "recovering: forming the ranks again, restoring state",
    "starting": "starting: from the callback's set-up to the first step",
    "down": "down: from the last sign of life to the next start",
    "other": "all else: callbacks, logging, the time between steps",
}
_FLUSH_S = 1.0


class Ledger:
    """The seconds of a run, by purpose; stored as a file in its folder.

    Attributes:
        seconds: by part, see PARTS.
        furthest: the highest step ever reached; steps below it are repeated.
        ranks: [first step, number of ranks] for each start and each change.
        until: the moment of the last write.
    """

    def __init__(self, path: Path) -> None:
        """Continue the file if it exists and can be read."""
        self._path = path
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.furthest = 0
        self.ranks: list[list[int]] = []
        self.until: Moment | None = None
        try:
            earlier = json.loads(path.read_text())
            self.seconds |= {part: float(earlier["seconds"][part]) for part in PARTS}
            self.furthest, self.ranks = int(earlier["furthest_step"]), list(earlier["ranks"])
            self.until = Moment(**earlier["until"])
        except (OSError, ValueError, KeyError, TypeError):
            pass

    @property
    def goodput(self) -> float:
        """The fraction of steps that count, 0 to 1."""
        return self.seconds["steps"] / max(1e-9, sum(self.seconds.values()))

    def write(self) -> None:
        """Write the file atomically."""
        self.until = Moment.now()
        content = {
            "goodput": self.goodput,
            "seconds": self.seconds,
            "furthest_step": self.furthest,
            "ranks": self.ranks,
        }
        with replacing(self._path) as draft:
            draft.write_text(
                json.dumps(content | {"until": asdict(self.until), "job": job_started()}, indent=1)
            )


@checked
class Goodput(Callback):
    """Keeps a ledger of the run's time in `<run_dir>/goodput.json`, prints it at the end, logs
    `goodput` at each epoch's end.

    The time is that of rank 0's main thread; if another process becomes rank 0, it continues the
    file. On a GPU the host runs ahead of the device: the wait for the device counts for the part in
    which the host waits.
    """

    config_key = "callbacks.goodput"

    def __init__(self) -> None:
        self.ledger: Ledger | None = None

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Record the start time of this process, or of this attempt."""
        if stage == "fit":
            self._began = time.perf_counter()
            self.ledger = None

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Open the ledger on rank 0, or continue it."""
        if not trainer.is_global_zero:
            return
        self.ledger = ledger = Ledger(trainer.run_dir / FILE)
        self._mark = self._flushed = time.perf_counter()
        self._fetched_ns = trainer.train_feed.fetching.waited_ns
        own = self._mark - self._began
        gap = own if ledger.until is None else max(own, Moment.now().seconds_since(ledger.until))
        if trainer.checkpoints.resumed_from_memory:
            ledger.seconds["recovering"] += gap
        else:
            ledger.seconds["starting"] += own
            ledger.seconds["down"] += gap - own
        ledger.ranks.append([trainer.global_step, trainer.world_size])
        self._flush(trainer)

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        """For a stream, the time before a step was spent on data;
        otherwise it belongs to no known part.
        """
        self._add("data" if isinstance(trainer.train_feed, StreamFeed) else "other")

    def on_train_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int
    ) -> None:
        self._add("data")

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        """Count the rest of a step; `global_step` has been incremented."""
        self._count_step(trainer, done=1)
        if self.ledger is not None:
            self.ledger.furthest = max(self.ledger.furthest, trainer.global_step)
            if time.perf_counter() - self._flushed > _FLUSH_S:
                self._flush(trainer)

    def on_validation_start(self, trainer: RunView, task: Task) -> None:
        self._add("other")

    def on_validation_end(self, trainer: RunView, task: Task) -> None:
        self._add("validating")

    def on_save_checkpoint(self, trainer: RunView, task: Task, checkpoint: dict[str, Any]) -> None:
        self._add("other")

    def on_save_checkpoint_end(self, trainer: RunView, task: Task) -> None:
        """End the part of a save that training waits for."""
        self._add("saving")

    def on_train_epoch_end(self, trainer: RunView, task: Task) -> None:
        self._add("other")
        if self.ledger is not None:
            trainer.log_metrics({"goodput": self.ledger.goodput})

    def on_fit_end(self, trainer: RunView, task: Task) -> None:
        if self.ledger is not None:
            self._add("other")
            show(self.ledger)

    def teardown(self, trainer: RunView, task: Task, stage: str) -> None:
        """Write the file, however the fit ends."""
        if self.ledger is not None and stage == "fit":
            self._add("other")
            self._flush(trainer)
            self.ledger = None

    def _add(self, part: str) -> None:
        if self.ledger is not None:
            now = time.perf_counter()
            self.ledger.seconds[part] += now - self._mark
            self._mark = now

    def _count_step(self, trainer: RunView, *_: Any, done: int = 0, **__: Any) -> None:
        """Count a part of a step; `done` is 1 once `global_step` counts it."""
        if self.ledger is not None:
            self._add("repeating" if trainer.global_step - done < self.ledger.furthest else "steps")

    on_after_backward = _count_step

    def on_before_optimizer_step(self, trainer: RunView, task: Task, optimizer: Any) -> None:
        """Count the sums over ranks; a wait for the next step's batch before them was for data."""
        if self.ledger is None:
            return
        fetched_ns = trainer.train_feed.fetching.waited_ns
        early_s = (fetched_ns - self._fetched_ns) / 1e9
        self._fetched_ns = fetched_ns
        self.ledger.seconds["data"] += early_s
        self._mark += early_s
        self._count_step(trainer)

    def _flush(self, trainer: RunView) -> None:
        assert self.ledger is not None
        try_to_write(self.ledger.write, f"{FILE} could not be written")
        self._flushed = time.perf_counter()


def show(ledger: Ledger) -> None:
    """Print a ledger."""
    total = sum(ledger.seconds.values())
    changes = len(ledger.ranks) - 1
    table = Table.grid(padding=(0, 2))
    again = f", {plural(changes, 'restart')} or change{'s' * (changes > 1)} of ranks" * bool(
        changes
    )
    table.add_row(
        Text("goodput", style="bold"), f"{100 * ledger.goodput:.1f} %", f"of {total:.1f} s{again}"
    )
    for part, meaning in PARTS.items():
        if ledger.seconds[part] >= 0.05:
            table.add_row("", f"{ledger.seconds[part]:.1f} s", meaning)
    show_table(table)
