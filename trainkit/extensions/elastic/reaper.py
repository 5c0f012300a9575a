"""Ends the workers of a killed driver: a separate process that outlives the driver, run as a
script.

The driver writes "+<process group>" when a worker on this host starts and "-<process group>" when
it has ended. When the pipe closes, the driver has ended; if it was killed, groups remain: they get
SIGTERM, and after 30 s SIGKILL. Standard library only, for an instant start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

GRACE_S = 30.0


def main() -> None:
    """Follow the driver, then end its workers."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        groups = groups | {group} if line[0] == "+" else groups - {group}
    _send(groups, signal.SIGTERM)
    end = time.monotonic() + GRACE_S
    while groups and time.monotonic() < end:
        time.sleep(0.1)
        groups = _send(groups, 0)
    _send(groups, signal.SIGKILL)


def _send(groups: set[int], number: int) -> set[int]:
    """Send a signal to groups; return those that exist."""
    there = set()
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
            there.add(group)
    return there


if __name__ == "__main__":
    main()
