"""Groups of Gloo end beside what follows: their threads take their time to end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainkit.engine.ddp import collectives
from trainkit.engine.ddp.collectives import DDPCollectives
from trainkit.engine.ddp.endings import end_beside, wait_for_endings
from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.ranks import Ranks
from trainkit.launch.environment import Launcher


class Ending:
    """Ends when it is let."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __del__(self) -> None:
        self._end()


def test_a_rank_waits_for_no_group_to_end_but_at_its_exit() -> None:
    """The group ends in another thread; the exit waits for it."""
    let, ended = threading.Event(), list[threading.Thread]()

    def end() -> None:
        let.wait(20)
        ended.append(threading.current_thread())

    end_beside([Ending(end)])
    assert not ended
    threading.Timer(0.1, let.set).start()
    wait_for_endings()
    assert ended and ended[0] is not threading.current_thread()


def test_on_gpus_a_group_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one needs its memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ended: list[threading.Thread] = []
    end_beside([Ending(lambda: ended.append(threading.current_thread()))])
    assert ended == [threading.current_thread()]


class LoneRanks(Ranks):
    """One rank of an elastic job, that meets no other."""

    is_elastic = True

    def meeting_store(self) -> Any:
        """A store of this process."""
        return dist.HashStore()  # type: ignore[attr-defined]


def num_threads() -> int:
    """Threads of this process, Gloo's too."""
    return len(list(Path("/proc/self/task").iterdir()))


def test_disconnecting_leaves_the_end_of_the_group_to_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After it nothing but what that thread is given holds the group, whose own threads live."""
    given: list[list[Any]] = []
    monkeypatch.setattr(collectives, "end_beside", given.append)
    before = num_threads()
    comm = DDPCollectives(LoneRanks(Launcher("none", 0, 1, 0, 1)), Heartbeat())
    comm.connect(torch.device("cpu"))
    comm.disconnect()
    assert not comm.is_connected
    assert num_threads() > before
    given.pop().clear()
    assert num_threads() <= before
