"""Writes docs/conformance.md from results.json, and the same as an HTML page."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.conformance.claims import load_claims
from benchmarks.conformance.sources import DECLARED, kind_of, source_of
from benchmarks.conformance.worker import TRAINERS
from trainkit.extensions.reports.grid import Grid
from trainkit.extensions.reports.page import Section, write_page

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
WORST_FIRST = ("error", "fails", "otherwise", "not run", "refused", "not supported", "holds")

_HEAD = """# Conformance: the field's claims as programs

What trainers promise, checked by programs, for trainkit and seven others, each as its own documentation uses it.
One command makes this page, and anybody can run it:

```sh
make peers composer                                              # the other trainers, pinned
.venv/bin/python -m benchmarks.conformance                       # all cells, about half an hour on two cores
.venv/bin/python -m benchmarks.conformance --only resume-samples --trainer Lightning
.venv/bin/python -m benchmarks.conformance --broken              # trainkit broken on purpose: the suite sees it
```

Every run is a process of its own; a run that is killed is killed in the model's forward, half a second after its
update, in every trainer at the same place. Small models on the CPU, plain SGD where a scale matters. The programs are in
[benchmarks/conformance](../benchmarks/conformance): `claims/` has what is checked, `trainers/` how each trainer is used.
Each red cell of another trainer was tried with what its documentation recommends for it, and stands where that did not
help. A cell that is wrong about your trainer is a bug all the same: report it, or send the program that is right.

- **holds**: on each number of ranks that the claim names (trainkit: alone, under horovodrun and under torchrun)
- **fails**: with the numbers and the thread, below
- **refused**: it ends with a clear error in place of the claim
- **otherwise**: it does otherwise, and has not said that it would not: trainkit alone makes this claim, its own limits of
  cost among them
- **not supported**: it has no such feature, by its own page
- **not run**: no program of this trainer checks the claim, for the reason below

A link is a *thread* on the failure, a *page* of the trainer that says so, or the *documented usage* that the program follows,
which says nothing of it. A column "by hand" is what PyTorch's tutorials and examples do: red there means that who copies them
has to write it.
"""

_COMPOSER = """
Composer's newest release, 0.32.1, requires torch below 2.7.1: its column runs on torch 2.7.0, in an environment of its own.
"""


def status_of(results: dict[str, Any], claim: str, trainer: str) -> str:
    """Return a cell's status: the worst of its starts."""
    if (trainer, claim) in DECLARED:
        return "not supported"
    starts = results["results"].get(claim, {}).get(trainer, {}).values()
    states = (state_of(start, claim, trainer) for start in starts)
    return min(states, key=WORST_FIRST.index, default="not run")


def state_of(result: dict[str, Any], claim: str, trainer: str) -> str:
    """Return the status of one start, as the page says it."""
    if result["status"] == "fails" and trainer != "trainkit" and load_claims()[claim].own:
        return "otherwise"
    return str(result["status"])


def rows_of(results: dict[str, Any]) -> list[list[str]]:
    """Return the table: a row per claim, a cell per trainer."""
    return [
        [claim.kind, name, *(status_of(results, name, trainer) for trainer in TRAINERS)]
        for name, claim in load_claims().items()
    ]


def totals(results: dict[str, Any]) -> dict[str, Counter[str]]:
    """Return how often each trainer has each status."""
    columns = list(zip(*(row[2:] for row in rows_of(results)), strict=True))
    return {trainer: Counter(cells) for trainer, cells in zip(TRAINERS, columns, strict=True)}


# README's rows: claims that users meet first, in its words.
README_ROWS = {
    "resume-weights": "killed and resumed, a run has the same weights",
    "resume-on-another-number-of-ranks": "resumed on more ranks, it sees each sample once",
    "tokens-over-ranks": "each token weighs the same, on any rank",
    "evaluation-over-ranks": "ranks count each validation sample once",
    "resume-past-a-torn-checkpoint": "a torn checkpoint costs one checkpoint",
}
_MARKS = {"holds": "yes", "fails": "**no**", "refused": "error"}


def readme_table(results: dict[str, Any]) -> str:
    """Return README's rows and the counts of all claims."""
    claims, counted = load_claims(), totals(results)
    lines = [f"| | {' | '.join(TRAINERS)} |", f"| --- |{' :-: |' * len(TRAINERS)}"]
    for name, sentence in README_ROWS.items():
        cells = [_MARKS.get(status_of(results, name, trainer), "-") for trainer in TRAINERS]
        lines.append(f"| {sentence} | {' | '.join(cells)} |")
    held = [str(counted[trainer]["holds"]) for trainer in TRAINERS]
    lines.append(f"| of {len(claims)} claims | {' | '.join(held)} |")
    return "\n".join(lines)


def notes_of(results: dict[str, Any], claim: str) -> list[str]:
    """Return a line for each cell that does not hold, and trainkit's numbers."""
    lines = []
    for trainer in TRAINERS:
        if (trainer, claim) in DECLARED:
            text, url = DECLARED[trainer, claim]
            lines.append(f"- {trainer}: not supported: {text} ([page]({url}))")
            continue
        starts = results["results"].get(claim, {}).get(trainer, {})
        if status_of(results, claim, trainer) == "not run":
            lines.append(f"- {trainer}: not run: not recorded yet")
            continue
        for start, result in starts.items():
            state = state_of(result, claim, trainer)
            if state == "holds" and trainer != "trainkit":
                continue
            where = "" if start == "alone" else f", {start}"
            text = " ".join(result["text"].split()).replace("<", "&lt;").replace("|", "/")
            line = f"- {trainer}{where}: {state}: `{text}`"
            url = source_of(trainer, claim)
            if state in ("fails", "refused") and url:
                line += f" ([{kind_of(trainer, claim)}]({url}))"
            lines.append(line)
    return lines


def markdown(results: dict[str, Any]) -> str:
    """Return the page."""
    claims = load_claims()
    shown = {"holds": "holds", "fails": "**fails**", "error": "**error**"}
    parts = [_HEAD, f"{len(claims)} claims; {results['date']}; {_versions(results)}.", ""]
    parts += [f"| | {' | '.join(TRAINERS)} |", f"| --- |{' --- |' * len(TRAINERS)}"]
    for kind, name, *cells in rows_of(results):
        line = " | ".join(shown.get(cell, cell) for cell in cells)
        parts.append(f"| [{kind}: {_title(name)}](#{name}) | {line} |")
    counted = totals(results)
    for status in ("holds", "fails", "refused", "otherwise", "not supported", "not run", "error"):
        numbers = [counted[trainer][status] for trainer in TRAINERS]
        if any(numbers):
            parts.append(f"| **{status}** | {' | '.join(map(str, numbers))} |")
    parts += [_COMPOSER, "## Numbers and sources", ""]
    for name, claim in claims.items():
        parts += [f"({name})=", f"### {_title(name)}", "", claim.sentence, ""]
        parts += [*notes_of(results, name), ""]
    parts += ["## trainkit broken on purpose", "", _BROKEN, ""]
    parts += ["| break | cells that turned | still holds |", "| --- | --- | --- |"]
    for entry in results.get("broken", []):
        parts.append(f"| {entry['sentence']} | {', '.join(entry['turned'])} | {entry['stays']} |")
    return "\n".join(parts).rstrip() + "\n"


_BROKEN = (
    "A suite that cannot fail proves nothing. Each line is a change to trainkit, made in the process"
    " of the run (`benchmarks/conformance/broken.py`), the cells that it turns from holds to fails,"
    " and one that it leaves alone."
)


def _title(name: str) -> str:
    return name.replace("-", " ")


def _versions(results: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(results["versions"].items()))


def write_html(results: dict[str, Any], path: Path) -> None:
    """Write the page with the look of trainkit's reports."""
    claims = load_claims()
    columns = ("claim", *TRAINERS)
    kinds = dict.fromkeys(claim.kind for claim in claims.values())
    sections = []
    for kind in kinds:
        rows = [(_title(r[1]), *r[2:]) for r in rows_of(results) if r[0] == kind]
        grid = Grid(kind, columns, rows, sentences=tuple(range(1, len(columns))))
        sections.append(Section(kind.capitalize(), grid=grid, id=kind))
    for name, claim in claims.items():
        notes = tuple(line.removeprefix("- ").replace("`", "") for line in notes_of(results, name))
        sections.append(Section(_title(name), (claim.sentence, *notes), id=name))
    counted = totals(results)
    cards = [(f"{trainer} holds", str(counted[trainer]["holds"])) for trainer in TRAINERS]
    under = f"{len(claims)} claims, {results['date']}: {_versions(results)}"
    write_page(path, "Conformance", under, cards, sections)


def load_results() -> dict[str, Any]:
    """Return what was recorded; the first time, nothing."""
    if not RESULTS.exists():
        return {"results": {}, "date": "", "versions": {}}
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found
