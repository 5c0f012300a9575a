"""Ranks, collectives and the heartbeat of an engine, without a framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.threads import ThreadEngine, World
from trainkit.engine.collectives import LocalCollectives, PeerError
from trainkit.engine.heartbeat import Heartbeat, LocalPosition
from trainkit.engine.ranks import Ranks
from trainkit.engine.reduce.reducer import Summed
from trainkit.errors import ConfigError
from trainkit.launch.environment import Launcher


def test_ranks_are_the_launchers_until_they_are_assigned() -> None:
    """Assigned numbers replace the launcher's,
    and fixed ranks have as many at the start as at the most.
    """
    ranks = Ranks(Launcher("torchrun", 3, 4, 1, 2))
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_size, ranks.is_main) == (
        3,
        4,
        1,
        2,
        False,
    )
    ranks.assign(0, 2, 0, 1)
    assert (ranks.rank, ranks.is_main, ranks.gpu_index) == (0, True, 0)
    assert (ranks.first_world_size, ranks.max_world_size, ranks.change_requested) == (2, 2, False)


def test_rank_0_outside_of_a_process_set_is_not_main() -> None:
    """Rank 0 of the launcher writes no files if it trains nothing; the set's first rank does."""
    outside = Ranks(Launcher("torchrun", 0, 2, 0, 2))
    inside = Ranks(Launcher("torchrun", 1, 2, 1, 2))
    for ranks in (outside, inside):
        ranks.narrow((1,), [0, 0])
    assert [(ranks.rank, ranks.takes_part, ranks.is_main) for ranks in (outside, inside)] == [
        (0, False, False),
        (0, True, True),
    ]


def test_an_error_of_the_framework_is_a_peers() -> None:
    """Within `waiting_for` the framework's errors become a PeerError; others pass;
    `waiting` is cleared after both.
    """

    class Fragile(LocalCollectives):
        peer_errors = (ConnectionError,)

    heartbeat = Heartbeat()
    comm = Fragile(Ranks(Launcher("none", 0, 1, 0, 1)), heartbeat)
    for error, expected in ((ConnectionError("gone"), PeerError), (ValueError("own"), ValueError)):
        with pytest.raises(expected, match=str(error)), comm.waiting_for("a sum"):
            assert heartbeat.waiting == "a sum"
            raise error
        assert heartbeat.waiting == ""


def test_an_error_of_rank_0_is_raised_on_all_ranks() -> None:
    """`run_on_main` runs only on rank 0, and returns or raises the same on all ranks."""

    def work(engine: ThreadEngine) -> tuple[int, str]:
        with engine:
            value = engine.comm.run_on_main(lambda: 10 + engine.ranks.rank)
            try:
                engine.comm.run_on_main(refuse)
            except ConfigError as error:
                return value, str(error)
            return value, ""

    def refuse() -> Any:
        raise ConfigError("no such folder")

    assert World(3).run(work) == [(10, "no such folder")] * 3


def test_step_progress_and_waiting_are_kept_in_the_position() -> None:
    """An elastic driver's link reads the heartbeat that the loop writes."""
    position = LocalPosition(step=4)
    heartbeat = Heartbeat(position)
    assert heartbeat.step == 4
    heartbeat.step, heartbeat.waiting = 5, "a sum"
    heartbeat.progress += 1
    assert (position.step, position.progress, position.waiting) == (5, 1, "a sum")


def test_a_timeline_records_the_sums_of_the_reducer() -> None:
    """Start, stop and take go to the current reducer; without one they do nothing."""
    summed, calls = [Summed(("w",), 4, 1, 2)], []

    class Recorder:
        def record(self, on: bool) -> None:
            calls.append(on)

        def take_summed(self) -> list[Summed]:
            return summed

        def outstanding(self) -> list[str]:
            return ["w"]

    heartbeat = Heartbeat(sum_settings={"wire": "fp16"})
    for reducer in (None, Recorder()):
        heartbeat.reducer = reducer  # type: ignore[assignment]
        assert heartbeat.start_timeline(Path("unused")) == ""
        heartbeat.stop_timeline()
        assert heartbeat.take_summed() == ([] if reducer is None else summed)
        assert heartbeat.outstanding() == ([] if reducer is None else ["w"])
    assert calls == [True, False]
    assert heartbeat.sum_settings == {"wire": "fp16"}
    assert not heartbeat.watch(1.0, lambda: None)
