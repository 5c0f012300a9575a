"""The order of forwards and backwards on each rank."""

from __future__ import annotations

import itertools

import pytest

from trainkit.extensions.pipeline.links import _lane
from trainkit.extensions.pipeline.schedule import INTERLEAVED, StageSchedule, schedule_of, times


def order_of(schedule: StageSchedule, rank: int, microbatches: int) -> str:
    """A rank's passes: F or B, the chunk, and the microbatch."""
    return " ".join(
        f"{'BF'[each.forward]}{each.chunk}{each.microbatch}"
        for each in schedule.order(rank, range(microbatches))
    )


def test_a_rank_runs_a_backward_as_soon_as_it_can() -> None:
    """Of 1f1b, and of gpipe after all forwards."""
    assert order_of(StageSchedule("1f1b", 2), 0, 3) == "F00 F01 B00 F02 B01 B02"
    assert order_of(StageSchedule("1f1b", 2), 1, 3) == "F00 B00 F01 B01 F02 B02"
    assert order_of(StageSchedule("gpipe", 2), 1, 3) == "F00 F01 F02 B00 B01 B02"


def test_chunks_take_turns() -> None:
    """Groups of as many microbatches as ranks; of a short last group some are left out."""
    schedule = StageSchedule(INTERLEAVED, 2, 2)
    assert order_of(schedule, 1, 3) == "F00 F01 F10 B10 F11 B11 F02 B00 B01 F12 B12 B02"
    assert order_of(schedule, 0, 2) == "F00 F01 F10 F11 B10 B11 B00 B01"


@pytest.mark.parametrize("ranks", range(2, 9))
def test_no_rank_waits_forever(ranks: int) -> None:
    """With any number of chunks and microbatches; and none runs ahead further than it says."""
    for chunks, microbatches in itertools.product(range(2, 6), range(1, 3 * ranks + 2)):
        schedule = StageSchedule(INTERLEAVED, ranks, chunks)
        times(schedule, microbatches, [1] * schedule.stages)
        for rank in range(ranks):
            held = schedule.most_of(rank, microbatches, [1] * chunks)
            assert max(held) <= schedule.ahead(rank)


def test_all_that_a_link_carries_is_received_in_order() -> None:
    """Sends to the next rank, and receives from it, have the same order on both; and no rank both
    sends and receives in one group of its links.
    """
    for ranks, chunks in itertools.product(range(2, 8), range(2, 4)):
        schedule = StageSchedule(INTERLEAVED, ranks, chunks)
        passes = [list(schedule.order(rank, range(2 * ranks + 1))) for rank in range(ranks)]
        for rank in range(ranks):
            after = (rank + 1) % ranks
            for forward in (True, False):
                stages = [[], []]
                for own, at in ((stages[0], rank), (stages[1], after)):
                    moved = at == after
                    for each in passes[at]:
                        stage = each.chunk * ranks + at - moved
                        if each.forward == forward and 0 <= stage < schedule.stages - 1:
                            own.append((stage, each.microbatch))
                assert stages[0] == stages[1]
            assert _lane(rank, ranks) != _lane(rank - 1, ranks)


def test_schedules_have_names() -> None:
    """With the default of chunks."""
    assert schedule_of(INTERLEAVED, 4).stages == 8
    assert schedule_of("1f1b", 4).stages == 4
