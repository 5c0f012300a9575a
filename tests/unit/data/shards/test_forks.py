"""Gate: a fork waits for work, and work for a fork."""

from __future__ import annotations

import os
import threading

import pytest

from trainkit.data.shards.forks import GATE


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_waits_for_the_threads_that_fetch() -> None:
    """And in the child the gate is open, though the thread that worked is not there."""
    begun, end = threading.Event(), threading.Event()
    order: list[str] = []

    def work() -> None:
        with GATE.work():
            begun.set()
            end.wait()
            order.append("work")

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    threading.Timer(0.1, end.set).start()
    child = os.fork()
    if child == 0:
        with GATE.work():
            os._exit(7)
    order.append("fork")
    thread.join()
    assert order == ["work", "fork"]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
