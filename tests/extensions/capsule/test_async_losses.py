"""AsyncLosses: the mean loss of a step, returned when it has arrived."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers.late_device import late_device
from trainkit.extensions.capsule import async_losses as late_losses
from trainkit.extensions.capsule.async_losses import AsyncLosses


def test_on_the_cpu_a_loss_is_there_at_once() -> None:
    """A step's loss is the mean over its samples;
    each is returned once, and a step without samples has none.
    """
    losses = AsyncLosses(torch.device("cpu"))
    losses.add(torch.tensor(1.0, requires_grad=True), 3)
    losses.add(torch.tensor(5.0), 1)
    losses.end_step(7)
    losses.begin_step()
    losses.end_step(8)
    assert losses.ready() == [(7, 2.0)]
    assert losses.ready() == losses.drain() == []


def test_of_a_step_that_is_taken_again_the_last_attempt_counts() -> None:
    """The losses of a failed attempt are discarded."""
    losses = AsyncLosses(torch.device("cpu"))
    losses.add(torch.tensor(9.0), 4)
    losses.add(torch.tensor(1.0), 2, attempt=2)
    losses.add(torch.tensor(2.0), 2, attempt=2)
    losses.end_step(0)
    losses.begin_step()
    losses.add(torch.tensor(4.0), 2, attempt=2)
    losses.end_step(1)
    assert losses.ready() == [(0, 1.5), (1, 4.0)]


@pytest.fixture(params=[None, *range(4)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An accelerator whose work runs late; four steps fit in the memory for losses."""
    monkeypatch.setattr(late_losses, "_SLOTS", 4)
    with late_device(request.param) as device:
        yield device


def steps(losses: AsyncLosses, device: torch.device, numbers: range) -> Iterator[None]:
    """Take steps of two microbatches each, whose losses are on the device."""
    for step in numbers:
        losses.begin_step()
        losses.add(torch.full((), float(step), device=device), 1)
        losses.add(torch.full((), float(step), device=device), 3)
        losses.end_step(step)
        yield


def test_on_an_accelerator_no_step_waits(device: torch.device) -> None:
    """Losses are returned in order, as soon as they have come: those behind nothing has waited for
    come with `drain`.
    """
    losses = AsyncLosses(device)
    list(steps(losses, device, range(3)))
    early = losses.ready()
    assert early == [(step, float(step)) for step in range(len(early))]
    torch.accelerator.synchronize()
    assert early + losses.ready() == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert losses.drain() == []
    list(steps(losses, device, range(3, 5)))
    assert losses.drain() == [(3, 3.0), (4, 4.0)]


def test_a_host_that_is_far_ahead_loses_nothing(device: torch.device) -> None:
    """With all slots used, the host waits for the oldest."""
    losses = AsyncLosses(device)
    list(steps(losses, device, range(9)))
    came = losses.ready()
    assert len(came) >= 5
    assert came + losses.drain() == [(step, float(step)) for step in range(9)]


def test_no_step_waits_while_there_are_slots() -> None:
    """If work runs as late as possible, nothing has run when the steps are over."""
    with late_device() as device:
        losses = AsyncLosses(device)
        list(steps(losses, device, range(3)))
        assert losses.ready() == [] and torch.accelerator.current_stream().query() is False
