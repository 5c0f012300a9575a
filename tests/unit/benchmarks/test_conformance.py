"""The conformance suite's tables: claims, trainers, sources, and the committed page."""

from __future__ import annotations

import inspect

from benchmarks.conformance.broken import BREAKS
from benchmarks.conformance.claims import load_claims
from benchmarks.conformance.page import PAGE, README_ROWS, load_results, markdown, status_of
from benchmarks.conformance.sources import DECLARED, THREADS, source_of
from benchmarks.conformance.worker import TRAINERS

LONGEST_PROGRAM = 60  # lines


def test_each_claim_is_one_sentence() -> None:
    """A claim says in a sentence what holds, and its program is read in one sitting."""
    claims = load_claims()
    assert len(claims) >= 40
    for claim in claims.values():
        assert claim.sentence.endswith(".") and len(claim.sentence) > 30, claim.name
        assert len(inspect.getsource(claim.program).splitlines()) <= LONGEST_PROGRAM, claim.name
        assert claim.ranks and set(claim.ranks) <= {1, 2}, claim.name


def test_trainkits_column_is_whole() -> None:
    """trainkit was checked on each claim, on each number of ranks that the claim names."""
    results = load_results()["results"]
    for claim in load_claims().values():
        starts = set(results[claim.name]["trainkit"])
        wanted = {"alone"} if 1 in claim.ranks else set()
        wanted |= {"horovodrun", "torchrun"} if 2 in claim.ranks else set()
        assert starts == wanted, claim.name
        assert not any(who == "trainkit" for who, _ in DECLARED)


def test_tables_name_what_exists() -> None:
    """Results, sources and breaks name claims and trainers that exist."""
    claims, results = load_claims(), load_results()["results"]
    assert set(results) <= set(claims)
    assert {trainer for by in results.values() for trainer in by} <= set(TRAINERS)
    for trainer, claim in (*DECLARED, *THREADS):
        assert trainer in TRAINERS and claim in claims, (trainer, claim)
    assert set(README_ROWS) <= set(claims)
    for broken in BREAKS.values():
        assert {*broken.turns, broken.stays} <= set(claims)


def test_each_failure_of_others_has_a_source() -> None:
    """A red cell of another trainer links the thread of it, or the page that its program follows."""
    results = load_results()
    for claim in load_claims():
        for trainer in TRAINERS:
            if status_of(results, claim, trainer) == "fails" and trainer != "trainkit":
                assert source_of(trainer, claim).startswith("https://"), (trainer, claim)
            assert status_of(results, claim, trainer) != "error", (trainer, claim)


def test_the_page_is_that_of_the_results() -> None:
    """docs/conformance.md is what results.json gives: python -m benchmarks.conformance --page."""
    assert PAGE.read_text() == markdown(load_results())


def test_breaks_were_seen() -> None:
    """At least ten ways to break trainkit turned the cells that they must, and left another."""
    seen = {entry["break"]: entry for entry in load_results()["broken"]}
    assert len(BREAKS) >= 10 and set(seen) == set(BREAKS)
    for name, broken in BREAKS.items():
        assert tuple(seen[name]["turned"]) == broken.turns, name
        assert seen[name]["stays"] == broken.stays, name
