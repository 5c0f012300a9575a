"""What an experiment has shown, as a value, a table, a page and JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.console import console_of, plural, short
from trainkit.errors import ConfigError
from trainkit.extensions.experiment.page import write_experiment_page
from trainkit.extensions.experiment.seeds import SeedPair
from trainkit.extensions.experiment.statistics import LEVEL, Interval, paired, unpaired
from trainkit.extensions.reports.grid import Grid

_SOURCE = (
    "Paired: the mean of b - a over the seeds, +- t(n - 1) s / sqrt(n) with s the standard deviation"
    " of these differences (Student 1908). Unpaired: the same values without their seeds, by Welch"
    " (1947). Both as in NIST/SEMATECH, e-Handbook of Statistical Methods, 1.3.5.3. Differences of"
    " seeds are taken as independent and about normal; the interval is about other seeds, not about"
    " other data."
)


@dataclass(frozen=True)
class ComparedConfigs:
    """The result.

    Attributes:
        a: side a, as typed.
        b: side b, as typed.
        metric: that is compared.
        mode: "min" or "max": which value is better.
        pairs: of the seeds that have run.
        left_out: seeds that a budget did not allow.
        contract: what both sides share.
    """

    a: str
    b: str
    metric: str
    mode: str
    pairs: Sequence[SeedPair]
    left_out: Sequence[int]
    contract: dict[str, Any]

    @property
    def values(self) -> tuple[list[float], list[float]]:
        """The values of a and of b, a seed each."""
        both = [pair.values(self.metric) for pair in self.pairs]
        return [a for a, _ in both], [b for _, b in both]

    @property
    def paired(self) -> Interval:
        """Of the differences of the same seeds."""
        return paired(*self.values)

    @property
    def unpaired(self) -> Interval:
        """Of the same values, without their seeds."""
        return unpaired(*self.values)

    @property
    def verdict(self) -> str:
        """Which side is better."""
        return self.paired.verdict(self.mode)

    def grids(self) -> list[Grid]:
        """Return the values by seed, and the two intervals."""
        rows = [
            (str(pair.seed), f"{a:.6g}", f"{b:.6g}", f"{b - a:+.4g}")
            for pair, a, b in zip(self.pairs, *self.values, strict=True)
        ]
        by_seed = Grid(self.metric, ("seed", "a", "b", "b - a"), rows)
        intervals = [
            (name, f"{one.difference:+.4g}", _span(one), one.verdict(self.mode))
            for name, one in (("paired", self.paired), ("unpaired", self.unpaired))
        ]
        columns = ("interval", "b - a", f"{LEVEL:.0%}", "verdict")
        return [by_seed, Grid("Difference", columns, intervals, sentences=(2, 3))]

    def notes(self) -> list[str]:
        """Return the sentences beside the tables."""
        notes = [pairing(self.pairs), self._cost("a"), self._cost("b")]
        if self.left_out:
            seeds = ", ".join(map(str, self.left_out))
            notes.append(
                f"Not run, since the budget had ended: seed {seeds}. The same command with a new"
                " budget continues there."
            )
        if len(self.pairs) < 2:
            notes.append("One seed has no interval: give seeds=3 or more.")
        return notes

    def _cost(self, side: str) -> str:
        records = [getattr(pair, side) for pair in self.pairs]
        seconds = statistics.fmean(record["seconds"] for record in records)
        fit = statistics.fmean(record["fit_s"] for record in records)
        samples = statistics.fmean(record["samples_seen"] for record in records)
        return (
            f"Cost of {side}: {seconds:,.1f} s a run, {fit:,.1f} s of it training;"
            f" {samples:,.0f} samples a run."
        )

    def facts(self) -> dict[str, Any]:
        """Return it for --json."""
        a, b = self.values
        rows = [
            {
                "seed": pair.seed,
                "a": first,
                "b": second,
                "seconds": [pair.a["seconds"], pair.b["seconds"]],
                "samples": [pair.a["samples_seen"], pair.b["samples_seen"]],
            }
            for pair, first, second in zip(self.pairs, a, b, strict=True)
        ]
        intervals = {
            name: {"low": one.low, "high": one.high, "difference": one.difference}
            for name, one in (("paired", self.paired), ("unpaired", self.unpaired))
        }
        return {
            "a": self.a,
            "b": self.b,
            "metric": self.metric,
            "mode": self.mode,
            "verdict": self.verdict,
            **intervals,
            "level": LEVEL,
            "seeds": rows,
            "left_out": list(self.left_out),
            "contract": self.contract,
            "notes": self.notes(),
        }


def pairing(pairs: Sequence[SeedPair]) -> str:
    """Return a sentence: what the two runs of each seed share, by their records.

    Raises:
        ConfigError: they had other samples, or another order.
    """
    weights = set()
    augmented = False
    for pair in pairs:
        for rank, (a, b) in enumerate(zip(pair.a["order"], pair.b["order"], strict=True)):
            if a != b:
                step = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
                raise ConfigError(
                    f"The two sides are not paired: with seed {pair.seed} rank {rank} got other"
                    f" samples from step {step + 1} on. Their samplers or lengths differ: give both"
                    " the same data."
                )
        augmented = augmented or pair.a["samples"] != pair.b["samples"]
        shared = set(pair.a["weights"].items()) & set(pair.b["weights"].items())
        weights.add((len(shared), len(pair.a["weights"]), len(pair.b["weights"])))
    samples = (
        "the same samples in the same order, with other values (augmentation, or other data)"
        if augmented
        else "the same samples in the same order, bit for bit"
    )
    ((same, of_a, of_b), *others) = sorted(weights)
    whole = same == of_a == of_b and not others
    first = (
        "the same first weights"
        if whole
        else f"{same} of {of_a} and {of_b} first weights equal (the models differ, or one draws"
        " numbers that the seed does not control)"
    )
    return f"Each seed: {samples}; {first}."


def show(result: ComparedConfigs, folder: Path) -> dict[str, Any]:
    """Print the result, write the page and the JSON; return its facts."""
    console = console_of()
    for grid in result.grids():
        console.print(grid.rich())
    for note in result.notes():
        console.print(note, soft_wrap=True, markup=False)
    console.print(f"verdict  {verdict_line(result)}", soft_wrap=True, markup=False)
    page = folder / "reports" / "experiment.html"
    a, b = result.values
    write_experiment_page(
        page,
        f"a: {result.a}, b: {result.b}",
        [("verdict", result.verdict), ("b - a", f"{result.paired.difference:+.4g}")]
        + [("seeds", str(len(result.pairs)))],
        [pair.seed for pair in result.pairs],
        [second - first for first, second in zip(a, b, strict=True)],
        (result.paired, result.unpaired),
        result.grids(),
        [verdict_line(result), *result.notes()],
        _SOURCE,
    )
    console.print(f"page     {short(page)}", soft_wrap=True)
    return {**result.facts(), "page": str(page)}


def verdict_line(result: ComparedConfigs) -> str:
    """Return the verdict as a sentence."""
    count = plural(len(result.pairs), "seed")
    span = _span(result.paired)
    return f"{result.verdict}: {result.metric} of b less that of a is {span}, over {count}"


def _span(one: Interval) -> str:
    if not math.isfinite(one.half_width):
        return f"{one.difference:+.4g}, without an interval"
    return f"{one.difference:+.4g} +- {one.half_width:.2g}, from {one.low:+.4g} to {one.high:+.4g}"
