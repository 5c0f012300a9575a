"""Golden losses: 20 steps of each recipe at 1 and 2 ranks give the stored numbers,
digit for digit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.record import FLOAT64, RUNS, STEPS, STORED, losses, processor

pytestmark = pytest.mark.parallel
# Steps compared on another processor: batches of 4 normalise with few samples, so rounding grows
# tenfold a step, from 1e-16.
COMPARED = {"resnet18": 8}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("run", RUNS)
def test_losses_are_those_that_are_stored(run: str, ranks: int, tmp_path: Path) -> None:
    """No refactor changes a digit of the losses;
    on another processor than the stored one, none of six in float64.
    """
    stored = json.loads(STORED.read_text())
    if processor() == stored["processor"]:
        assert losses(run, ranks, tmp_path) == stored[f"{run} at {ranks}"]
        return
    expected, found = stored[f"{run} at {ranks} in float64"], losses(run, ranks, tmp_path, FLOAT64)
    assert len(found) == STEPS
    compared = COMPARED.get(run, STEPS)
    assert list(map(float, found[:compared])) == pytest.approx(
        list(map(float, expected[:compared])), rel=1e-6
    )
