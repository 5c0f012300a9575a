"""Goodput: what share of a run's time went into steps that count, over all its restarts and changes of ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from trainkit.api.callback import Callback
from trainkit.arguments import checked
from trainkit.console import console_of, plural
from trainkit.data.feed import StreamFeed

if TYPE_CHECKING:
    from trainkit.api.task import Task
    from trainkit.trainer import Trainer

FILE = "goodput.json"
PARTS = {
    "steps": "steps that count",
    "repeating": "steps again that were lost",
    "data": "waiting for data",
    "validating": "validating",
    "saving": "saving: checkpoints and commits, as far as training waits",
    "recovering": "recovering: ranks formed anew, state put back",
    "starting": "starting: from the callback's set-up to the first step",
    "down": "down: from the last sign of life to the next start",
    "other": "all else: callbacks, logging, what lies between steps",
}
_FLUSH_S = 1.0


class Ledger:
    """The seconds of a run by what they went into; a file of its folder.

    Attributes:
        seconds: by part, see PARTS.
        furthest: the most steps that were ever taken; steps below it are repeated.
        ranks: [step, number of ranks], from that step on; one entry for each start and each change.
        until: rank 0's wall clock when it was last written.
    """

    def __init__(self, path: Path) -> None:
        """Go on with the file, where there is one that can be read."""
        self._path = path
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.furthest = 0
        self.ranks: list[list[int]] = []
        self.until: float | None = None
        try:
            kept = json.loads(path.read_text())
            self.seconds |= {part: float(kept["seconds"][part]) for part in PARTS}
            self.furthest, self.ranks, self.until = int(kept["furthest_step"]), list(kept["ranks"]), float(kept["until"])
        except (OSError, ValueError, KeyError, TypeError):
            pass

    @property
    def goodput(self) -> float:
        """The share of steps that count, 0 to 1."""
        return self.seconds["steps"] / max(1e-9, sum(self.seconds.values()))

    def write(self) -> None:
        """Write the file, as a whole or not at all."""
        self.until = time.time()
        content = {"goodput": self.goodput, "seconds": self.seconds, "furthest_step": self.furthest, "ranks": self.ranks}
        draft = self._path.with_name(f".{self._path.name}.draft")
        draft.write_text(json.dumps(content | {"until": self.until}, indent=1))
        draft.replace(self._path)


@checked
class Goodput(Callback):
    """Keeps a ledger of the run's time in `<run_dir>/goodput.json`, prints it at the end, logs `goodput` at each epoch's end.

    The time is that of rank 0's main thread; where rank 0 passes to another process, that one goes on with the file. On a GPU
    the host runs ahead of the device: what it waits for in the end is counted where it waits.
    """

    config_key = "callbacks.goodput"

    def __init__(self) -> None:
        self.ledger: Ledger | None = None

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Note when this process, or this attempt, began."""
        if stage == "fit":
            self._began, self.ledger = time.perf_counter(), None

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        """Rank 0: go on with the ledger."""
        if not trainer.is_global_zero:
            return
        self.ledger = ledger = Ledger(trainer.run_dir / FILE)
        self._mark = self._flushed = time.perf_counter()
        own = self._mark - self._began
        gap = own if ledger.until is None else max(own, time.time() - ledger.until)
        if trainer.session.goes_on_from_memory:
            ledger.seconds["recovering"] += gap
        else:
            ledger.seconds["starting"] += own
            ledger.seconds["down"] += gap - own
        ledger.ranks.append([trainer.global_step, trainer.world_size])
        self._flush(trainer)

    def on_train_step_start(self, trainer: Trainer, task: Task) -> None:
        """A stream was waited for; else what was before is neither a step nor anything that is known."""
        self._add("data" if isinstance(trainer.session.run.feed, StreamFeed) else "other")

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        """The loader was waited for."""
        self._add("data")

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A part of a step."""
        self._add_step(trainer.global_step)

    def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Any) -> None:
        """A part of a step."""
        self._add_step(trainer.global_step)

    def on_train_step_end(self, trainer: Trainer, task: Task) -> None:
        """The rest of a step, whose number has been counted."""
        self._add_step(trainer.global_step - 1)
        if self.ledger is not None:
            self.ledger.furthest = max(self.ledger.furthest, trainer.global_step)
            if time.perf_counter() - self._flushed > _FLUSH_S:
                self._flush(trainer)

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        """It begins."""
        self._add("other")

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        """It is over."""
        self._add("validating")

    def on_save_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        """It begins."""
        self._add("other")

    def on_save_checkpoint_end(self, trainer: Trainer, task: Task) -> None:
        """It is over, as far as training waits for it."""
        self._add("saving")

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        """Log."""
        self._add("other")
        if self.ledger is not None:
            trainer.session.hooks("on_metrics", {"goodput": self.ledger.goodput}, trainer.global_step)

    def on_fit_end(self, trainer: Trainer, task: Task) -> None:
        """Print."""
        if self.ledger is not None:
            self._add("other")
            show(self.ledger)

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
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

    def _add_step(self, step: int) -> None:
        if self.ledger is not None:
            self._add("repeating" if step < self.ledger.furthest else "steps")

    def _flush(self, trainer: Trainer) -> None:
        assert self.ledger is not None
        trainer.session.try_files(self.ledger.write, f"{FILE} could not be written")
        self._flushed = time.perf_counter()


def show(ledger: Ledger) -> None:
    """Print a ledger."""
    total = sum(ledger.seconds.values())
    changes = len(ledger.ranks) - 1
    table = Table.grid(padding=(0, 2))
    again = f", {plural(changes, 'restart')} or change{'s' * (changes > 1)} of ranks" * bool(changes)
    table.add_row(Text("goodput", style="bold"), f"{100 * ledger.goodput:.1f} %", f"of {total:.1f} s{again}")
    for part, words in PARTS.items():
        if ledger.seconds[part] >= 0.05:
            table.add_row("", f"{ledger.seconds[part]:.1f} s", words)
    console_of().print(table)
