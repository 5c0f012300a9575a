"""Output of workers, line by line with a rank prefix, like horovodrun's: "[1]<stdout>:step 20"."""

from __future__ import annotations

import codecs
import contextlib
import functools
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO

from trainkit.safety.threads import printed, start_thread


class WorkerOutput:
    """Writes the workers' lines to the screen and to files.

    Args:
        folder: a folder for files "worker.<host>-<slot>-<count>/stdout" and "stderr", in addition
            to the screen; None: no files.
        with_time: whether each line starts with the time.
        instead: an open file that takes the place of this process's output and errors, or None.
    """

    def __init__(self, folder: Path | None, with_time: bool, instead: TextIO | None = None) -> None:
        self._folder = folder
        self._instead = instead
        self._with_time = with_time
        self._lock = threading.Lock()
        self._labels: dict[str, str] = {}
        self._threads: list[threading.Thread] = []

    def label(self, worker: str, text: str) -> None:
        """Set the prefix of a worker's lines, its rank."""
        self._labels[worker] = text

    def follow(self, worker: str, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Copy a worker's output until it ends."""
        for pipe, screen, name in ((stdout, sys.stdout, "stdout"), (stderr, sys.stderr, "stderr")):
            copy = functools.partial(self._copy, worker, pipe, self._instead or screen, name)
            effect = f"The {name} of {worker} is not shown from here on."
            self._threads.append(start_thread(f"{name} {worker}", copy, printed(effect)))
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def drain(self, timeout_s: float) -> None:
        """Wait until all output is written, with a time limit:
        processes left behind by a worker may hold a pipe open.
        """
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def say(self, text: str) -> None:
        """Print one of the driver's own lines."""
        self._write(self._instead or sys.stderr, None, f"[elastic] {text}\n")

    def _copy(self, worker: str, pipe: IO[bytes], screen: TextIO, name: str) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(pipe)
            file = self._open(worker, name)
            if file is not None:
                stack.enter_context(file)
            for line in _lines(pipe):
                when = time.asctime() if self._with_time else ""
                self._write(
                    screen, file, f"{when}[{self._labels.get(worker, worker)}]<{name}>:{line}"
                )

    def _open(self, worker: str, name: str) -> TextIO | None:
        if self._folder is None:
            return None
        folder = self._folder / f"worker.{re.sub('[/#]', '-', worker)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return (folder / name).open("w", encoding="utf-8")
        except OSError as error:  # a full disk must not stop the workers, whose pipe is read here
            self.say(
                f"{folder / name} could not be opened, and stays without the output of {worker}:"
                f" {error}"
            )
            return None

    def _write(self, screen: TextIO, file: TextIO | None, text: str) -> None:
        with self._lock:
            for target in (screen, file):
                if target is not None:
                    # a closed reader must not stop the workers
                    with contextlib.suppress(OSError, ValueError):
                        target.write(text)
                        target.flush()


def _lines(pipe: IO[bytes]) -> Iterator[str]:
    """Yield lines as they arrive; progress bars end theirs with a carriage return,
    ssh with that and a line feed: one end.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest = ""
    while True:
        chunk = pipe.read1(2**16)  # type: ignore[attr-defined]
        *whole, rest = re.split(
            r"(?<=\n)|(?<=\r)(?!\n)", rest + decoder.decode(chunk, final=not chunk)
        )
        yield from (line.replace("\r\n", "\n") for line in whole if line)
        if not chunk:
            break
    if rest:
        yield rest + "\n"
