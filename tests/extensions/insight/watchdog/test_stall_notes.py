"""Stall notes: finding the rank that blocks the others, from the ranks' notes."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from trainkit.checkpoint.writer import Writer
from trainkit.engine.single import SingleEngine
from trainkit.extensions.insight.watchdog.stall_notes import Note, Notes, find_stall
from trainkit.extensions.insight.watchdog.watchdog import _Watch


def note(rank: int, waiting: str = "", still_s: float = 0.0, tensors: tuple[str, ...] = ()) -> Note:
    """Return a rank's note."""
    return Note(rank, f"node{rank}", 100 + rank, 7, waiting, tensors, still_s, 3)


def stall(
    *notes: Note, silent: dict[int, float] | None = None, timeout_s: float = 10.0
) -> str | None:
    """Return the stall found in these notes."""
    quiet = dict.fromkeys(range(len(notes)), 0.0) | (silent or {})
    return find_stall({n.rank: n for n in notes}, quiet, len(notes), timeout_s)


SUMS = "the sums of gradients"


def test_a_stuck_rank_that_waits_for_no_other_is_named() -> None:
    """It is named with its host, process and step, and the collective in which the others wait."""
    text = stall(note(0, SUMS, 12, ("conv1.weight", "fc.bias")), note(1, "", 12))
    assert text is not None
    assert text.startswith(
        "rank 1 (node1, process 101) has made no progress for 12 s at step 7, and waits for no"
        " rank."
    )
    assert (
        "rank 0 (node0, process 100) waits, at step 7, for the sums of gradients: conv1.weight,"
        " fc.bias" in text
    )


def test_a_rank_whose_note_does_not_change_is_frozen() -> None:
    """A stopped process, or a host that is cut off, cannot report that it is stuck."""
    text = stall(note(0, SUMS, 12), note(1), silent={1: 11.0})
    assert text is not None and text.startswith(
        "rank 1 (node1, process 101) has been frozen or cut off for 11 s"
    )


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """Mismatched calls are no single rank's fault."""
    text = stall(note(0, SUMS, 12), note(1, "the barrier", 12))
    assert text is not None and text.startswith("All ranks wait, but for different collectives")
    assert "for the barrier" in text


@pytest.mark.parametrize(
    "notes",
    [
        # a long validation step, a long download: no rank waits for another
        [note(0, "", 50), note(1, "", 50)],
        [note(0, SUMS, 9), note(1, "", 9)],
        [note(0, SUMS, 12), note(1, "", 3)],  # it is slow, and gets on
        [note(0, SUMS, 12), note(1, "the barrier", 3)],
    ],
)
def test_ranks_that_are_slow_are_left_alone(notes: list[Note]) -> None:
    """A rank is hung only if it is stuck while others wait for as long."""
    assert stall(*notes) is None


def test_many_tensors_are_counted() -> None:
    """The message stays readable."""
    text = stall(note(0, SUMS, 12, tuple(f"layer{i}" for i in range(30))), note(1, "", 12))
    assert text is not None and "layer0, layer1, layer2, layer3 and 26 more" in text


def test_notes_travel_by_files(tmp_path: Path) -> None:
    """A rank reads the other's notes; a rank that has never written counts as silent."""
    now = 100.0
    own, other = (Notes(tmp_path, rank, 2, clock=lambda: now) for rank in range(2))
    now += 3
    own.write(5, SUMS, ["w"], 1.5)
    notes, silent = other.read()
    assert (notes[0].step, notes[0].waiting, notes[0].tensors, notes[0].still_s) == (
        5,
        SUMS,
        ("w",),
        1.5,
    )
    assert notes[0].pid == os.getpid() and notes[1].step == -1
    assert silent == {0: 0, 1: 3}
    now += 4
    assert other.read()[1] == {0: 4, 1: 7}
    own.write(5, SUMS, ["w"], 2.0)
    assert other.read()[1][0] == 0


def test_the_watching_thread_is_a_thread_like_any_other(tmp_path: Path) -> None:
    """A forked loader worker, and its liveness check, are not disturbed by it."""
    watch = _Watch(SingleEngine("cpu"), tmp_path, 1.0)
    watch.start()
    assert watch._thread.is_alive()
    watch.stop()
    watch._thread.join(5)
    assert not watch._thread.is_alive()


def test_stacks_are_written_to_their_end(tmp_path: Path) -> None:
    """A rank whose file is begun is waited for: the launcher ends all ranks when the first one
    exits.
    """
    watch = _Watch(SingleEngine("cpu"), tmp_path, 1.0)
    own = replace(note(0), pid=os.getpid())
    assert not watch._are_written(own)
    watch.dump()
    assert watch._are_written(own)
    (file,) = tmp_path.glob("stacks-rank0-*.txt")
    text = file.read_text()
    assert "test_stacks_are_written_to_their_end" in text
    file.write_text(text[: text.index("most recent call first")])
    assert not watch._are_written(own)


def test_a_slow_disk_is_no_stall() -> None:
    """A rank that waits for a checkpoint to be written makes progress."""
    progress, written = iter([False, True]), threading.Event()
    writer = Writer()
    writer.on_wait = lambda: written.set() if next(progress, True) else None
    in_time: list[bool] = []
    writer.start(lambda: in_time.append(written.wait(30)))
    writer.wait()
    assert in_time == [True], "no second sign of progress while the disk was slow"
