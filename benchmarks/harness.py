"""Shared by all benchmarks: contenders that take turns, findings as JSON, and a command line.

A benchmark is a module with `measure(short) -> Findings` that ends in `main(measure)`. Its figures
are ratios of one run: contenders take turns (A B C, B C A, ...), so other load on the machine
affects all alike. `--short` runs each of them once or twice with tiny numbers, as a smoke test; its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table as RichTable

Cell = str | float | int | None


@dataclass
class Table:
    """Figures as printed and saved.

    Attributes:
        title: what was measured, with its unit.
        columns: their names; the first names the contender or the setting.
        rows: one cell for each column; numbers unrounded; None where there is no figure (say why in
            `Findings.missing`).
    """

    title: str
    columns: list[str]
    rows: list[list[Cell]]

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), (self.title, row)


@dataclass
class Target:
    """The bound of a figure.

    Attributes:
        what: the figure, in words.
        measured: its value.
        limit: the bound.
        unit: of both.
        bound: whether the limit is the most ("at most") or the least ("at least").
    """

    what: str
    measured: float
    limit: float
    unit: str
    bound: Literal["at most", "at least"] = "at most"

    @property
    def met(self) -> bool:
        """Whether it is reached."""
        return (
            self.measured <= self.limit if self.bound == "at most" else self.measured >= self.limit
        )


@dataclass
class Findings:
    """The findings of one benchmark.

    Attributes:
        tables: its figures.
        targets: bounds of figures.
        missing: contender -> reason of its absence.
        settings: settings of the figures (threads, batch size, rounds, ...).
    """

    tables: list[Table] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Cell] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the contents of the JSON file."""
        return asdict(self) | {
            "targets": [asdict(target) | {"met": target.met} for target in self.targets]
        }


def take_turns(
    contenders: Mapping[str, Callable[[], Sequence[float]]],
    rounds: int,
    between: Callable[[], None] = lambda: None,
) -> dict[str, list[list[float]]]:
    """Let contenders run in turn, another one first in each round; return the samples of each,
    round by round.

    A first round, which warms libraries and the allocator, is left out.

    Args:
        contenders: name -> runs once and returns its samples (seconds of each step, for example).
        rounds: number of counted runs of each.
        between: called after each run (a barrier of the ranks, for example).
    """
    names = list(contenders)
    samples: dict[str, list[list[float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken = list(contenders[name]())
            between()
            if turn > 0:
                samples[name].append(taken)
    return samples


def median(rounds: Sequence[Sequence[float]]) -> float:
    """Return the median over all samples of all rounds."""
    return statistics.median(sample for taken in rounds for sample in taken)


def median_ratio(rounds: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> float:
    """Return the median over rounds of (a round's median / the base's median in the same round)."""
    return statistics.median(
        statistics.median(a) / statistics.median(b) for a, b in zip(rounds, base, strict=True)
    )


def quartiles(values: Sequence[float]) -> str:
    """Return the first and the third quartile, in words."""
    if len(values) < 2:
        return ""
    low, _, high = statistics.quantiles(values, n=4)
    return f"{shown(low)} to {shown(high)}"


def absent(modules: Mapping[str, str]) -> dict[str, str]:
    """Return contender -> reason, for modules that are not installed."""
    return {
        name: f"{module} is not installed (make peers)"
        for name, module in modules.items()
        if importlib.util.find_spec(module) is None
    }


def shown(cell: Cell) -> str:
    """Return a cell as it is printed: three digits that count."""
    if cell is None:
        return "-"
    if isinstance(cell, (str, bool)):
        return str(cell)
    if isinstance(cell, int) or abs(cell) >= 1000:
        return f"{cell:,.0f}"
    return f"{cell:.3g}" if abs(cell) < 100 else f"{cell:.0f}"


def main(measure: Callable[[bool], Findings]) -> None:
    """Measure, print the tables, and write them to the file of --json."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--short",
        action="store_true",
        help="see that each contender runs; the figures mean nothing",
    )
    parser.add_argument("--json", type=Path, default=None, help="write the findings here")
    options = parser.parse_args()
    start = time.perf_counter()
    findings = measure(options.short)
    console = Console()
    for table in findings.tables:
        drawn = RichTable(*table.columns, title=table.title)
        for row in table.rows:
            drawn.add_row(*map(shown, row))
        console.print(drawn)
    for target in findings.targets:
        reached = "reached" if target.met else "NOT REACHED"
        console.print(
            f"{target.what}: {shown(target.measured)} {target.unit} ({target.bound}"
            f" {shown(target.limit)}: {reached})"
        )
    for name, why in findings.missing.items():
        console.print(f"without {name}: {why}")
    if options.json:
        options.json.write_text(
            json.dumps(
                findings.as_json() | {"took_s": round(time.perf_counter() - start, 1)}, indent=1
            )
            + "\n"
        )
