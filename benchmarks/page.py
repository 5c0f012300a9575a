"""Writes the figures of results.json into the README.md beside it, and a few of them into the
project's.

    python -m benchmarks.page [--check]

A block of a page that begins with `<!-- NAME -->` and ends with `<!-- /NAME -->` is replaced by
that benchmark's tables; `targets` by all targets, `summary` by the main figures, `conformance` by
rows of that suite, `history` by
that of the figures. The text between blocks is written by hand. --check changes nothing, and fails if a page is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import history
from benchmarks.conformance.page import load_results, readme_table
from benchmarks.everything import RESULTS
from benchmarks.harness import shown

PAGE = Path(__file__).parent / "README.md"
_ROOT = Path(__file__).parents[1]
PAGES = (
    PAGE,
    _ROOT / "README.md",
    *(_ROOT / "docs" / name for name in ("communication.md", "ray.md")),
)
GPU_RESULTS = RESULTS.with_name("results-gpu.json")


def tables(result: Mapping[str, Any]) -> str:
    """Return a benchmark's tables, its settings, and the missing contenders."""
    parts = []
    for table in result["tables"]:
        head = " | ".join(table["columns"])
        rule = " | ".join(["---"] + ["---:"] * (len(table["columns"]) - 1))
        rows = ["| " + " | ".join(map(shown, row)) + " |" for row in table["rows"]]
        parts.append("\n".join([f"**{table['title']}**", "", f"| {head} |", f"| {rule} |", *rows]))
    settings = ", ".join(f"{name} {shown(value)}" for name, value in result["settings"].items())
    absent = [f"Without {name}: {why}." for name, why in result["missing"].items()]
    parts.append("\n".join([f"{result['date']}{f'; {settings}' if settings else ''}.", *absent]))
    return "\n\n".join(parts)


def targets(results: Mapping[str, Any]) -> str:
    """Return the table of targets."""
    rows = ["| | measured | target | |", "| --- | ---: | ---: | --- |"]
    for name, result in results.items():
        for target in result["targets"]:
            reached = "reached" if target["met"] else "**not reached**"
            limit = f"{target['bound']} {shown(target['limit'])}"
            rows.append(
                f"| {name}: {target['what']} | {shown(target['measured'])} {target['unit']} |"
                f" {limit} | {reached} |"
            )
    return "\n".join(rows)


def summary(results: Mapping[str, Any]) -> str:
    """Return the time that each trainer adds to a step, and to a start."""
    with_log = {row[0]: row[2] for row in results["overhead"]["tables"][0]["rows"]}
    kinds = results["kinds"]["tables"][0]
    of_people = next(row for row in kinds["rows"] if row[0] == "DataLoader over a Dataset")
    added = dict(
        zip(
            (name.removesuffix(" adds, us") for name in kinds["columns"][2:]),
            of_people[2:],
            strict=True,
        )
    )
    imported = {row[0]: row[1] for row in results["startup"]["tables"][0]["rows"]}
    rows = [
        f"| adds | to a step of {shown(of_people[1])} us | with logs, progress, checkpoints | to a start |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in imported:
        if name in added:
            to_a_step, all_on = added[name], with_log.get(f"{name}, all on")
            cells = [
                f"{to_a_step:,.0f} us",
                "-" if all_on is None else f"{all_on:,.0f} us",
                f"{imported[name]:.2f} s",
            ]
            rows.append(f"| {name} | " + " | ".join(cells) + " |")
    alike, as_shipped = (shown(target["measured"]) for target in results["throughput"]["targets"])
    note = f"ResNet-50 on 2 ranks: {alike} to {as_shipped} of a loop by hand."
    if any(added[name] < 0 for name in imported if name in added):
        note = f"Below zero: without a DataLoader's cost for each batch. {note}"
    return "\n".join([*rows, "", note])


def machines(results: Mapping[str, Any]) -> str:
    """Return the machines and versions."""
    kinds = {json.dumps(result["machine"], sort_keys=True) for result in results.values()}
    lines = []
    for kind in sorted(kinds):
        facts = json.loads(kind)
        where = (
            f"{facts.pop('cores')} cores of an {facts.pop('processor')},"
            f" {facts.pop('memory_gib')} GiB"
        )
        lines.append(
            f"{where}; " + ", ".join(f"{name} {version}" for name, version in facts.items()) + "."
        )
    return "\n".join(lines)


def fill(page: str, results: Mapping[str, Any]) -> str:
    """Return the page with all blocks filled.

    Raises:
        KeyError: a block's figures are missing.
    """

    def block(match: re.Match[str]) -> str:
        name = match[1]
        whole = {"targets": targets, "machines": machines, "summary": summary}
        if name == "conformance":
            text = readme_table(load_results())
        elif name == "history":
            text = history.table(history.load())
        else:
            text = whole[name](results) if name in whole else tables(results[name])
        return f"<!-- {name} -->\n{text}\n<!-- /{name} -->"

    return re.sub(r"<!-- ([a-z_]+) -->\n.*?<!-- /\1 -->", block, page, flags=re.DOTALL)


def main() -> None:
    """Write the page, or check it."""
    results = json.loads(RESULTS.read_text())
    if GPU_RESULTS.exists():
        results["gpu"] = json.loads(GPU_RESULTS.read_text())
    for path in PAGES:
        before = path.read_text()
        after = fill(before, results)
        if "--check" not in sys.argv:
            path.write_text(after)
        elif after != before:
            sys.exit(f"{path} is out of date with results.json: python -m benchmarks.page")


if __name__ == "__main__":
    main()
