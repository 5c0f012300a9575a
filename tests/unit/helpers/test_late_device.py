"""The accelerator of the tests: what runs late there, and which faults it shows."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.late_device import late_device


def test_work_runs_when_something_waits_for_it() -> None:
    """Queued operations have no result before; the host's own tensors are as ever."""
    with late_device() as device:
        there = torch.arange(4.0).pin_memory().to(device, non_blocking=True)
        twice = (there * 2).double()
        assert twice.memory.isnan().all() and (twice.device, twice.dtype) == (device, torch.float64)
        assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]
        assert float(twice.sum()) == 12.0  # a read waits
        assert twice.cpu().tolist() == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("seed", [None, *range(8)])
@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_wait_for_a_stream_is_seen(waits: bool, seed: int | None) -> None:
    """With the wait the result is right in any order; without it, it is not, if work runs late."""
    with late_device(seed) as device:
        side = torch.Stream(device)
        with side:
            there = torch.ones(3).pin_memory().to(device, non_blocking=True)
        if waits:
            torch.accelerator.current_stream().wait_stream(side)
        total = float((there + 1).sum())
        assert total == 6.0 if waits else seed is not None or total != 6.0


def test_memory_that_is_not_recorded_for_a_stream_is_taken_by_the_next_tensor() -> None:
    """As torch's allocator: a freed block belongs to the stream that allocated it, which may write
    to it before another has read it.
    """
    for is_recorded in (True, False):
        with late_device() as device:
            side, computing = torch.Stream(device), torch.accelerator.current_stream()
            total = torch.zeros(2, device=device)
            for number in (1.0, 2.0):
                with side:
                    there = torch.full((2,), number).pin_memory().to(device, non_blocking=True)
                computing.wait_stream(side)
                if is_recorded:
                    there.record_stream(computing)
                total += there
                del there
            side.synchronize()  # it may run ahead
            assert (total.tolist() == [3.0, 3.0]) == is_recorded


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_copy_from_pinned_memory_reads_it_late(is_pinned: bool) -> None:
    """The host must not write there before; what is not pinned was staged by the call."""
    with late_device() as device:
        own = torch.ones(2).pin_memory() if is_pinned else torch.ones(2)
        assert own.is_pinned() == is_pinned
        there = own.to(device, non_blocking=True)
        own.zero_()
        assert there.tolist() == ([0.0, 0.0] if is_pinned else [1.0, 1.0])


def test_a_host_that_reads_too_soon_sees_no_result() -> None:
    """Until an event behind the copy has come."""
    with late_device() as device:
        host = torch.empty(2, dtype=torch.int64, pin_memory=True).fill_(7)
        host.copy_(torch.arange(2).to(device), non_blocking=True)
        event = torch.Event()
        event.record()
        assert host.tolist() == [7, 7] and not event.query()
        event.synchronize()
        assert host.tolist() == [0, 1] and event.query()
        assert torch.ones(2).to(device).to("cpu", non_blocking=True).isnan().all()


def test_events_tell_the_time_between_them() -> None:
    """In pieces of work; only timed ones, and only when they have come."""
    with late_device() as device:
        events = [torch.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        torch.zeros(2, device=device).add_(1).mul_(2)
        events[1].record()
        with pytest.raises(RuntimeError, match="not completed"):
            events[0].elapsed_time(events[1])
        torch.accelerator.synchronize()
        assert events[0].elapsed_time(events[1]) == 4.0
        with pytest.raises(ValueError, match="enable_timing"):
            events[0].elapsed_time(torch.Event())
