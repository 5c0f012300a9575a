"""AsyncLosses: the mean loss of a step, returned when it has arrived."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


class Event:
    """A GPU event that completes when the test says so."""

    come = 0
    made = 0

    def __init__(self) -> None:
        self.number = Event.made
        Event.made += 1

    def record(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return whether it has completed."""
        return self.number < Event.come

    def synchronize(self) -> None:
        """Wait for it."""
        Event.come = max(Event.come, self.number + 1)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> AsyncLosses:
    """AsyncLosses on a GPU with events controlled by the test; four steps fit in its memory."""
    Event.come = Event.made = 0
    empty = torch.empty
    monkeypatch.setattr(late_losses, "_SLOTS", 4)
    monkeypatch.setattr(torch.cuda, "Event", Event)

    def without_pinning(*size: Any, **options: Any) -> torch.Tensor:
        return empty(
            *size, **{name: value for name, value in options.items() if name != "pin_memory"}
        )

    monkeypatch.setattr(torch, "empty", without_pinning)
    return AsyncLosses(torch.device("cuda"))


def test_on_a_gpu_no_step_waits(on_gpu: AsyncLosses) -> None:
    """Losses are returned in order, as soon as their event has completed."""
    for step in range(3):
        on_gpu.add(torch.tensor(float(step)), 1)
        on_gpu.end_step(step)
    assert on_gpu.ready() == []
    Event.come = 2
    assert on_gpu.ready() == [(0, 0.0), (1, 1.0)]
    assert on_gpu.drain() == [(2, 2.0)]


def test_a_host_that_is_far_ahead_loses_nothing(on_gpu: AsyncLosses) -> None:
    """With all slots used, the host waits for the oldest."""
    for step in range(9):
        on_gpu.add(torch.tensor(float(step)), 1)
        on_gpu.end_step(step)
    assert [step for step, _ in on_gpu.ready()] == [0, 1, 2, 3, 4]
    assert on_gpu.drain() == [(step, float(step)) for step in (5, 6, 7, 8)]
