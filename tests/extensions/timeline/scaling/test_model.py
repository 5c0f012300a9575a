"""The model of larger numbers of ranks:
fitted to some measurements, and checked against another.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.recordings import ABOUT, PARTS, record
from trainkit.extensions.timeline.report.overlap import ReductionCost, ring_of
from trainkit.extensions.timeline.report.steps import analyse
from trainkit.extensions.timeline.scaling.model import (
    PREDICTED,
    MeasuredRanks,
    Model,
    check_words,
    excess_words,
    measured_grid,
    network,
    predictions_grid,
)
from trainkit.extensions.timeline.scaling.model import fit as fit_both
from trainkit.extensions.timeline.traces.merge import read_recording

GRADIENTS = {"late": 8_000_000}  # ready when backward ends
LINK = ReductionCost(0.001, 1e9)  # among two ranks
SUMS = [(size, LINK.seconds(size)) for size in (1e3, 1e5, 1e6, 1e7)]


def measured(folder: Path, ranks: int, noise_ms: float = 0.0, **parts: float) -> MeasuredRanks:
    """Return the measurement of this number of ranks, in steps of these parts."""
    draw = random.Random(ranks)

    def parts_of(rank: int, step: int) -> Mapping[str, float]:
        own = PARTS | parts
        return own | {"forward": own["forward"] + draw.gauss(0, noise_ms)} if noise_ms else own

    about = replace(ABOUT, cycle_ms=0.0, engine="ddp" if ranks > 1 else "single")
    made = record(
        folder / str(ranks),
        ranks=ranks,
        steps=40,
        parts_of=parts_of,
        about=about,
        gradients=GRADIENTS,
    )
    return MeasuredRanks(ranks, analyse(read_recording(made)), SUMS if ranks > 1 else [])


def fit(measured: list[MeasuredRanks]) -> Model | None:
    """Return the model without the largest number of ranks."""
    both = fit_both(measured)
    return None if both is None else both[0]


def test_the_model_predicts_ranks_that_it_has_not_seen(tmp_path: Path) -> None:
    """From the steps of one rank and the cost of reductions among two,
    it predicts the steps of two to the last digit.
    """
    one = measured(tmp_path, 1, communication=0.0)
    two = measured(tmp_path, 2, communication=1000 * LINK.seconds(8e6))
    model = fit([one, two])
    assert model is not None and model.of_ranks == 1
    assert model.step_s(1) == pytest.approx(0.036)
    assert model.step_s(2) == pytest.approx(two.step_s) == pytest.approx(0.036 + 0.009)
    assert re.search(r"[+-]0\.0 %\.$", check_words(model, two))
    assert model.efficiency(2) == pytest.approx(0.036 / 0.045)


def test_a_ring_carries_it_to_more_ranks(tmp_path: Path) -> None:
    """2 (n - 1) alpha + 2 (n - 1) / n S / B, and at a given network with its bandwidth."""
    model = fit(
        [measured(tmp_path, 1, communication=0.0), measured(tmp_path, 2, communication=9.0)]
    )
    assert model is not None
    ring = ring_of(LINK, 2)
    assert model.exposed_s(8) == pytest.approx(14 * ring.alpha_s + 14 / 8 * 8e6 / ring.bytes_per_s)
    fast = network(model.ring, 100)
    assert model.exposed_s(8, fast) == pytest.approx(14 * ring.alpha_s + 14 / 8 * 8e6 / 12.5e9)
    grid = predictions_grid(model, [100])
    assert [row[0] for row in grid.rows] == ["8", "16", "32", "64", "128", "256", "512"]
    assert all(
        int(row[2].removesuffix(" %")) >= int(row[1].removesuffix(" %")) for row in grid.rows
    )


def test_a_model_that_is_off_says_not_to_trust_it(tmp_path: Path) -> None:
    """Two ranks slower than reductions explain are reported."""
    one = measured(tmp_path, 1, communication=0.0)
    two = measured(tmp_path, 2, communication=9.0, backward=60.0)
    model = fit([one, two])
    assert model is not None
    assert "-47" in check_words(model, two) and "do not trust" in check_words(model, two)


def test_ranks_that_share_a_host_are_predicted_by_a_line(tmp_path: Path) -> None:
    """One rank takes 36 ms, two take 46 each: four should take 66;
    and no more on further hosts like this one.
    """
    sizes = {1: (0.0, 20.0), 2: (9.0, 30.0), 4: (15.0, 50.0)}
    every = [measured(tmp_path, n, communication=c, backward=b) for n, (c, b) in sizes.items()]
    both = fit_both(every)
    assert both is not None
    check, model = both
    assert check.of_ranks == 2 and [round(check.work_s(n), 6) for n in (1, 2, 3, 4, 512)] == [
        0.036,
        0.046,
        0.056,
        0.066,
        0.066,
    ]
    # 3 of 2 sums' latency, 3/2 of their bytes: 15 ms
    assert check.step_s(4) == pytest.approx(every[2].step_s, rel=1e-6)
    assert model.of_ranks == 4 and model.work_s(512) == pytest.approx(0.066)


def test_waiting_grows_with_what_varies(tmp_path: Path) -> None:
    """The slowest of n normal values, by Blom's approximation;
    a common variation of all ranks causes no waiting.
    """
    model = fit([measured(tmp_path, 1), measured(tmp_path, 2, noise_ms=2.0), measured(tmp_path, 4)])
    assert model is not None and model.spread_s == pytest.approx(0.002, rel=0.3)
    assert [round(model.waiting_s(n) / model.spread_s, 2) for n in (1, 2, 8, 64)] == [
        0.0,
        0.59,
        1.43,
        2.34,
    ]
    alike = measured(tmp_path / "alike", 2)
    for step in alike.analysis.steps:
        step.seconds["forward"] += 0.050 * (step.step % 2)
    same = fit([alike, measured(tmp_path / "alike", 4)])
    assert same is not None and same.spread_s == pytest.approx(0.0, abs=1e-9)


def test_nothing_is_predicted_from_one_size(tmp_path: Path) -> None:
    """Nor from reductions that do not determine the cost."""
    one, two = measured(tmp_path, 1), measured(tmp_path, 2)
    assert fit_both([one]) is None and fit_both([two]) is None
    assert fit([one, replace(two, costs=[])]) is None


def test_efficiency_is_of_the_smallest_size(tmp_path: Path) -> None:
    """Samples per second relative to the smallest number of ranks, times the ranks."""
    one, two = measured(tmp_path, 1, communication=0.0), measured(tmp_path, 2, communication=9.0)
    rows = measured_grid([one, two]).rows
    assert (
        rows[0][3] == "100.0 %" and rows[1][3] == f"{100 * (32 / 0.045) / (2 * 32 / 0.036):.1f} %"
    )


def test_one_long_step_is_in_no_column(tmp_path: Path) -> None:
    """Step, speed, efficiency and shares are all medians:
    with one step of 800 ms the table is the same.
    """
    draw = PARTS | {"communication": 0.0}
    about = replace(ABOUT, cycle_ms=0.0, engine="single")

    def of(name: str, longest: float) -> MeasuredRanks:
        def parts_of(rank: int, step: int) -> Mapping[str, float]:
            return draw | {"data": longest if step == 5 else 1.0}

        folder = record(tmp_path / name, steps=20, parts_of=parts_of, about=about)
        return MeasuredRanks(1, analyse(read_recording(folder)), [])

    assert measured_grid([of("a", 800.0)]).rows == measured_grid([of("b", 1.0)]).rows


@pytest.mark.parametrize(
    ("noise_ms", "words"), [(0.0, "more than chance"), (9.0, "That is chance")]
)
def test_more_than_all_of_the_speed_is_explained(
    noise_ms: float, words: str, tmp_path: Path
) -> None:
    """An efficiency above 100 % is said to come from the smallest run, by chance or not;
    none is predicted.
    """
    one = measured(tmp_path, 1, noise_ms, communication=0.0, forward=10.5)
    two = measured(tmp_path, 2, communication=0.1)
    steps = [replace(step, samples=64) for step in two.analysis.steps]
    two = replace(two, analysis=replace(two.analysis, steps=steps))
    (said,) = excess_words([one, two])
    assert re.match(
        r"1\d\d\.\d % at 2 ranks: ranks do not make each other faster, so the step of 1 rank"
        r" \(\d\d",
        said,
    )
    assert words in said
    both = fit_both([one, two])
    assert both is not None
    assert all(both[1].efficiency(ranks) <= 1 for ranks in PREDICTED)
    assert excess_words([one, one]) == excess_words([two]) == []
