"""A worker of an elastic job that only pretends to train: python member.py FOLDER STEPS. No torch,
no Horovod.

It writes what it does to FOLDER/log, one line an event: "<event> <worker> <pid> <generation> <rank>
<size> <step>", and obeys files there: "stop" (all end), "hang-<rank>" (no progress, waits for
nothing), "wait-<rank>" (waits in a collective), "exit-<rank>" (its text is the exit code), "late"
(newcomers wait so many seconds before they join), "die-<host>" (newcomers there kill themselves),
"slow-end" (the interpreter takes 4 s to end).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trainkit.extensions.elastic.client import Membership

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
STEP_S = 0.02


class SlowEnd:
    """Delays the end of the interpreter."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Take it."""
        sleep(4)


def tell(event: str, m: Membership, rank: int = -1, size: int = -1) -> None:
    """Write one line, in one piece."""
    line = f"{event} {m.worker} {os.getpid()} {m.generation} {rank} {size} {m.step}\n"
    with (FOLDER / "log").open("a") as log:
        log.write(line)


def text(name: str) -> str | None:
    """Return a command's text, None if the file does not exist."""
    try:
        return (FOLDER / name).read_text()
    except FileNotFoundError:
        return None


def main() -> None:
    """Join, step, join again."""
    m = Membership.current()
    assert m is not None
    m.stall_s = float(os.environ.get("MEMBER_STALL_S", "60"))
    m.on_dump = lambda: tell("dump", m)
    preempted = []
    signal.signal(signal.SIGTERM, lambda number, frame: preempted.append(number))
    host = os.environ["HOROVOD_HOSTNAME"]
    tell("start", m)
    if text(f"die-{host}") is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(text("late") or 0) if "#1" not in m.worker else 0)
    commit = -1
    while True:
        tell("join", m)
        assignment = m.join(commit)
        commit = m.step = max(commit, 0)
        tell("rank", m, assignment.rank, assignment.size)
        print(f"rank {assignment.rank} of {assignment.size}")
        while not m.wanted:
            time.sleep(STEP_S)
            if preempted:
                tell("preempted", m, assignment.rank, assignment.size)
                sys.exit(75)
            if (code := text(f"exit-{assignment.rank}")) is not None:
                sys.exit(int(code))
            if m.step >= STEPS or text("stop") is not None:
                tell("done", m, assignment.rank, assignment.size)
                if text("slow-end") is not None:
                    sys.slow_end = SlowEnd()  # type: ignore[attr-defined]
                return
            if text(f"hang-{assignment.rank}") is not None:
                continue
            m.waiting = "grads" if text(f"wait-{assignment.rank}") is not None else ""
            if not m.waiting:
                m.step += 1
                m.progress += 1
                commit = m.step


if __name__ == "__main__":
    main()
