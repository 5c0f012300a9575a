"""Watchdog: names a hung rank and ends the job instead of waiting forever."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import PositiveFloat, checked
from trainkit.engine.base import Engine
from trainkit.extensions.insight.watchdog.stall_notes import Note, Notes, find_stall
from trainkit.safety.threads import printed, start_thread

_ROUNDS = 8  # notes per timeout
_LONGEST_S = 10.0  # maximum time between two notes
_WRITTEN = "\nThese are all threads.\n"  # the last line of stacks


@checked
class Watchdog(Callback):
    """Detects a rank that hangs (in an endless loop, in a read that never returns, frozen) while
    others wait for it.

    Then every responsive rank writes the stacks of its threads to
    `<run_dir>/logs/stacks-rank<N>-<process>.txt`, and the run ends with an error that names the
    hung rank, its host, its step, and the collective in which the others wait. In an elastic job
    the launcher replaces the hung rank instead, and the others continue.

    It costs a counter increment at each hook, and a thread that writes a line each
    `stall_timeout_s` / 8 (10 s at most).

    Args:
        stall_timeout_s: seconds that ranks may wait for one without progress. It must exceed any
            work that one rank does while the others wait for it (a download, a long computation on
            rank 0 alone).
    """

    config_key = "callbacks.watchdog"

    def __init__(self, stall_timeout_s: PositiveFloat = 120.0) -> None:
        self.stall_timeout_s = stall_timeout_s
        self._watch: _Watch | None = None

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Start the watchdog thread, unless the engine watches itself."""
        folder = trainer.run_dir / "logs"
        folder.mkdir(exist_ok=True)
        self._engine = trainer.engine
        self._watch = _Watch(trainer.engine, folder, self.stall_timeout_s)
        self._count_progress(trainer)
        if (
            not trainer.engine.heartbeat.watch(self.stall_timeout_s, self._watch.dump)
            and trainer.world_size > 1
        ):
            self._watch.note(0.0)
            self._watch.start()

    def teardown(self, trainer: RunView, task: Task, stage: str) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _count_progress(self, trainer: RunView, *_: Any, **__: Any) -> None:
        here = trainer.engine.heartbeat
        here.step = trainer.global_step
        here.progress += 1

    on_train_step_start = on_train_batch_start = on_after_backward = on_after_optimizer_step = (
        on_train_step_end
    ) = _count_progress
    on_validation_batch_start = on_validation_end = on_save_checkpoint = on_save_checkpoint_end = (
        _count_progress
    )


class _Watch:
    """Records this rank's progress in a thread, and reads the notes of the others."""

    def __init__(self, engine: Engine, folder: Path, timeout_s: float) -> None:
        self._engine = engine
        self._folder = folder
        self._timeout_s = timeout_s
        self._notes = Notes(folder, engine.ranks.rank, engine.ranks.world_size)
        self._ended = threading.Event()
        self._rounds_s = min(_LONGEST_S, timeout_s / _ROUNDS)

    def start(self) -> None:
        """Watch in a thread."""
        self._thread = start_thread(
            "watchdog", self._run, printed("The watchdog continues.", retry_s=self._rounds_s)
        )

    def stop(self) -> None:
        """End the thread; do not wait for it."""
        self._ended.set()

    def note(self, still_s: float) -> None:
        """Write where this rank is, and for how many seconds it has been stuck."""
        here = self._engine.heartbeat
        waiting = here.awaited
        self._notes.write(
            here.step, waiting, self._engine.heartbeat.outstanding() if waiting else [], still_s
        )

    def _run(self) -> None:
        here = self._engine.heartbeat
        progress = here.progress
        since = time.monotonic()
        while not self._ended.wait(self._rounds_s):
            if here.progress != progress:
                progress = here.progress
                since = time.monotonic()
            try:
                self.note(time.monotonic() - since)
                notes, silent = self._notes.read()
            except OSError:  # the disk is full or gone: the code that needs it reports that
                continue
            stall = find_stall(notes, silent, self._engine.ranks.world_size, self._timeout_s)
            if stall is not None and not self._ended.is_set():
                speaking = [
                    note for rank, note in sorted(notes.items()) if silent[rank] < self._timeout_s
                ]
                self._end(
                    stall, speaking, first=next(note.rank for note in speaking if note.waiting)
                )

    def dump(self) -> None:
        """Write the stacks of all threads, and what this rank waits for."""
        here = self._engine.heartbeat
        waiting = here.awaited
        with self._stacks(self._engine.ranks.rank, os.getpid()).open("w") as file:
            what = (
                f"waits for {waiting}: {', '.join(self._engine.heartbeat.outstanding()) or '-'}"
                if waiting
                else "waits for no rank"
            )
            file.write(
                f"rank {self._engine.ranks.rank}, process {os.getpid()}, after step {here.step}:"
                f" {what}\n\n"
            )
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write(_WRITTEN)

    def _are_written(self, note: Note) -> bool:
        """Return whether a rank's stacks are there to their end."""
        try:
            return self._stacks(note.rank, note.pid).read_text().endswith(_WRITTEN)
        except OSError:
            return False

    def _stacks(self, rank: int, pid: int) -> Path:
        return self._folder / f"stacks-rank{rank}-{pid}.txt"

    def _end(self, stall: str, speaking: list[Note], first: int) -> None:
        with contextlib.suppress(OSError):  # a full disk: the ranks must end all the same
            self.dump()
        if self._engine.ranks.rank == first:
            text = f"Error: {stall}\nThe stacks of all ranks: {self._folder}/stacks-*.txt"
            print(text, file=sys.stderr, flush=True)
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline and not all(map(self._are_written, speaking)):
            time.sleep(0.05)  # the launcher ends all ranks when the first one exits
        os._exit(1)  # the main thread cannot be reached
