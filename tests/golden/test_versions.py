"""The losses of each supported torch on each engine: recorded, compared, and on the page."""

from __future__ import annotations

import json

import pytest

from tests.golden.record import processor
from tests.golden.versions import (
    GLOBAL_BATCHES,
    LAYOUTS,
    PAGE,
    PRECISIONS,
    REFERENCE,
    STORED,
    VERSIONS,
    difference,
    fill,
    losses,
    reference_of,
)

RECORDED = json.loads(STORED.read_text())


def test_every_version_and_layout_is_recorded() -> None:
    """No cell of the table is empty."""
    assert set(RECORDED["losses"]) == set(VERSIONS)
    names = {f"{run} {precision}" for run in GLOBAL_BATCHES for precision in PRECISIONS}
    for layouts in RECORDED["losses"].values():
        assert set(layouts) == set(LAYOUTS)
        assert all(set(by_run) == names for by_run in layouts.values())


def test_the_page_shows_what_was_recorded() -> None:
    """docs/elastic.md has the table of versions.json: python -m tests.golden.versions --page."""
    text = PAGE.read_text()
    assert fill(text, RECORDED) == text


def test_all_engines_and_versions_agree() -> None:
    """In float64 neither an engine nor a version of torch moves a loss by more than rounding does."""
    for torch, layouts in RECORDED["losses"].items():
        for layout, by_run in layouts.items():
            reference = RECORDED["losses"][REFERENCE][reference_of(layout)]
            for run in ("mlp", "gpt"):
                name = f"{run} 64-true"
                assert within(by_run[name], reference[name], 1e-12), (torch, layout, run)


def test_a_difference_is_the_largest_relative_one() -> None:
    """Equal digits are said so; else the step that differs most counts."""
    assert difference(["1.0", "2.0"], ["1.0", "2.0"]) == "equal"
    assert difference(["1.0", "2.002"], ["1.0", "2.0"]) == "1e-03"


@pytest.mark.parallel
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_that_are_recorded(layout: str) -> None:
    """On the processor of the record each digit, on others all but the last of float64."""
    recorded = RECORDED["losses"][REFERENCE][layout]["mlp 64-true"]
    values = losses(layout, "mlp", "64-true")
    if processor() == RECORDED["processor"]:
        assert values == recorded
    assert within(values, recorded, 1e-6)


def within(values: list[str], expected: list[str], rel: float) -> bool:
    """Whether all losses are within a relative difference."""
    return [float(v) for v in values] == pytest.approx([float(e) for e in expected], rel=rel)
