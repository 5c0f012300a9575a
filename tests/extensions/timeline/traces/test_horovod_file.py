"""Horovod's timeline, read as operations."""

from __future__ import annotations

from tests.helpers.recordings import _head, _operation
from trainkit.extensions.timeline.traces.horovod_file import read_operations
from trainkit.extensions.timeline.traces.pieces import Event

GRADIENTS = {"a": 400, "b": 800}


def test_fused_tensors_are_one_operation() -> None:
    """With all their bytes, and the seconds of each activity."""
    (operation,) = read_operations([*_head(GRADIENTS), *_operation(GRADIENTS, 1000.0, 2000.0)])
    assert (operation.kind, operation.num_bytes) == ("ALLREDUCE", 1200)
    assert operation.names == ["trainkit.grad.a", "trainkit.grad.b"]
    assert (operation.start, operation.end) == (1000.0, 2000.0)
    assert round(operation.wire_s, 6) == 0.0008 and round(operation.copy_s, 6) == 0.0002


def test_one_after_the_other_are_two() -> None:
    """Also of the same tensors."""
    events = [*_operation(GRADIENTS, 0.0, 10.0), *_operation(GRADIENTS, 20.0, 30.0)]
    assert [o.start for o in read_operations([*_head(GRADIENTS), *events])] == [0.0, 20.0]


def test_times_are_of_the_steady_clock() -> None:
    """Horovod counts from its own start, and records when that was."""
    head = [
        {"ph": "M", "pid": 0, "args": {"start_time_steady_in_micros": 5000}},
        *_head(GRADIENTS)[1:],
    ]
    (operation,) = read_operations([*head, *_operation(GRADIENTS, 1.0, 2.0)])
    assert operation.start == 5001.0


def test_negotiation_is_no_operation() -> None:
    """It is in the file too, on rank 0, with ticks of the ranks."""
    negotiation: list[Event] = [
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 0, "pid": 1},
        {"ph": "X", "name": "1", "ts": 1, "pid": 1, "dur": 0},
        {"ph": "E", "ts": 2, "pid": 1},
    ]
    (operation,) = read_operations(
        [*_head(GRADIENTS), *negotiation, *_operation(GRADIENTS, 3.0, 4.0)]
    )
    assert operation.start == 3.0


def test_on_a_gpu_an_operation_may_begin_before_the_one_before_has_ended() -> None:
    """NCCL's operations are queued:
    the ends of the first come after the beginning of the second.
    """
    first, second = (
        _operation({name: 400}, start, start + 10) for name, start in (("a", 0.0), ("b", 5.0))
    )
    for event in second:
        event["pid"] = 2
    mixed = [*first[:-1], *second[:1], first[-1], *second[1:]]
    assert [o.names for o in read_operations([*_head(GRADIENTS), *mixed])] == [
        ["trainkit.grad.a"],
        ["trainkit.grad.b"],
    ]


def test_an_operation_that_was_cut_off_is_left_out() -> None:
    """Its tensors never ended."""
    events = [*_operation(GRADIENTS, 0.0, 10.0), *_operation(GRADIENTS, 20.0, 30.0)[:5]]
    assert len(read_operations([*_head(GRADIENTS), *events])) == 1
