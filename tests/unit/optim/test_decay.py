"""Decay over a whole run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainkit.errors import ConfigError
from trainkit.optim import constant, cosine, polynomial, step, wsd


def rates(make: Any, total_steps: int, **options: Any) -> list[float]:
    """Return the rate of each step of the run, and that after its last."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = make(optimizer, total_steps, **options)
    seen = []
    for _ in range(total_steps + 1):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_cosine_goes_from_the_rate_to_its_end() -> None:
    """Half a cosine: full at first, half in the middle, `end` of the rate at the last."""
    assert rates(cosine, 4) == pytest.approx([2.0, 1 + 2**-0.5, 1.0, 1 - 2**-0.5, 0.0])
    assert rates(cosine, 2, end=0.5) == pytest.approx([2.0, 1.5, 1.0])


def test_constant_changes_nothing() -> None:
    """Each step has the rate."""
    assert rates(constant, 2) == [2.0, 2.0, 2.0]


def test_polynomial_falls_with_its_power() -> None:
    """Power 2 is the square of the remaining share of the run;
    power 1 a straight line down to `end`.
    """
    assert rates(polynomial, 4) == pytest.approx([2.0, 2 * 9 / 16, 0.5, 2 / 16, 0.0])
    assert rates(polynomial, 2, power=1.0, end=0.1) == pytest.approx([2.0, 1.1, 0.2])


def test_a_held_rate_decays_over_the_rest_of_the_run() -> None:
    """With as many steps as warm-up has, transformers' schedules of the same names."""
    transformers = pytest.importorskip("transformers")
    whole = transformers.get_cosine_schedule_with_warmup
    line = transformers.get_linear_schedule_with_warmup
    held, falling = rates(cosine, 10, hold_steps=3), rates(polynomial, 10, power=1.0, hold_steps=3)
    there = {"num_warmup_steps": 3, "num_training_steps": 10}
    theirs = [rates(lambda each, _, make=make: make(each, **there), 10) for make in (whole, line)]
    assert held[:4] == falling[:4] == [2.0] * 4
    assert (held[3:], falling[3:]) == (
        pytest.approx(theirs[0][3:], abs=1e-12),
        pytest.approx(theirs[1][3:], abs=1e-12),
    )
    with pytest.raises(ConfigError, match=r"lr\.hold_steps is 4, and the run has 4 steps"):
        rates(cosine, 4, hold_steps=4)


def test_step_falls_at_the_milestones() -> None:
    """At each milestone, a share of the run, the rate falls by gamma;
    by default at epochs 30, 60 and 80 of 90.
    """
    assert rates(step, 4, milestones=[0.5, 0.75], gamma=0.5) == pytest.approx(
        [2.0, 2.0, 1.0, 0.5, 0.5]
    )
    seen = rates(step, 90)
    assert [i for i in range(1, 90) if seen[i] != pytest.approx(seen[i - 1])] == [30, 60, 80]


@pytest.mark.parametrize("make", [cosine, polynomial, wsd])
def test_after_the_run_the_rate_stays(make: Any) -> None:
    """A prolonged run continues at the last rate, and does not rise again."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = make(optimizer, 2, end=0.1)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


@pytest.mark.parametrize("milestones", [[0.5, 0.2], [0.0, 0.5], [30, 60]])
def test_milestones_are_rising_shares(milestones: list[float]) -> None:
    """Milestones that do not rise, or are epochs in place of shares, are refused."""
    with pytest.raises(ConfigError, match=r"lr\.milestones is .*shares of the run, rising"):
        rates(step, 90, milestones=milestones)


def test_wsd_holds_the_rate_and_lets_it_fall_at_the_end() -> None:
    """Stable up to the decay, then 1 - sqrt of the decay's share, a line or half a cosine, to
    `end`; by default in the last tenth.
    """
    assert rates(wsd, 8, decay=0.5) == pytest.approx([2.0] * 5 + [1.0, 2 - 2**0.5, 2 - 3**0.5, 0.0])
    assert rates(wsd, 4, decay_steps=2, decay_type="linear", end=0.5) == pytest.approx(
        [2.0, 2.0, 2.0, 1.5, 1.0]
    )
    assert rates(wsd, 4, decay_steps=4, decay_type="cosine") == pytest.approx(rates(cosine, 4))
    seen = rates(wsd, 100)
    assert [step for step in range(101) if seen[step] < 2.0] == [*range(91, 101)]
    assert rates(wsd, 5, decay=0.0) == [2.0] * 6


def test_wsd_refuses_two_lengths_and_a_decay_longer_than_the_run() -> None:
    """Each error names what was given, and what to give."""
    with pytest.raises(ConfigError, match=r"lr\.decay is 0\.2 and lr\.decay_steps is 3; give one"):
        rates(wsd, 5, decay=0.2, decay_steps=3)
    with pytest.raises(ConfigError, match=r"lr\.decay_steps is 6, and the run has 5 steps"):
        rates(wsd, 5, decay_steps=6)
