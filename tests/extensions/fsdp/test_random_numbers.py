"""The random numbers of a pass."""

from __future__ import annotations

import random
import traceback

import numpy as np
import pytest
import torch

from trainkit.data.seeding import seed_everything
from trainkit.extensions.fsdp.random_numbers import numbers_of


def drawn() -> list[float]:
    """One number of each source."""
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


def test_they_are_those_of_a_seed_and_the_run_continues_after_them() -> None:
    """As after seed_everything, and as if the pass had drawn none."""
    seed_everything(7)
    before = drawn()
    seed_everything(7)
    with numbers_of(3):
        within = drawn()
    assert drawn() == before
    seed_everything(3)
    assert drawn() == within


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="of devices that have not started")
def test_a_pass_writes_no_stack_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed does, for each kind of device that has not started: milliseconds a pass."""
    stacks = []
    monkeypatch.setattr(traceback, "format_stack", lambda *_: stacks.append(1) or [])
    with numbers_of(3):
        pass
    assert stacks == []
    torch.manual_seed(1)
    assert stacks, "torch does so no more: the helper can go"
