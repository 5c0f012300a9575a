"""The table and the verdict of check-engine, at most one screen."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from rich.table import Table

from trainkit.console import console_of, plural
from trainkit.extensions.check_engine.compare import (
    Comparison,
    StageResult,
    compare,
    facts_of,
    skipped_text,
)
from trainkit.extensions.check_engine.recording import EngineRecording

_WIDTH = 116
_SHOWN = 3
_BLURRED = 0.2


def compared(folder: Path, disturbed: int, error: float) -> Comparison:
    """Compare the records below a folder.

    Args:
        folder: with alone, disturbed-1, ... and ranks.
        disturbed: number of the disturbed ones.
        error: the size of their rounding error.

    Raises:
        ConfigError: they cannot be compared.
    """
    noisy = [EngineRecording.read(folder / f"disturbed-{i + 1}") for i in range(disturbed)]
    return compare(
        EngineRecording.read(folder / "alone"), noisy, EngineRecording.read(folder / "ranks"), error
    )


def report(result: Comparison, what: str, facts: dict[str, Any]) -> bool:
    """Print; return whether the ranks train as one process does.

    Args:
        result: of the comparison.
        what: names the checked run.
        facts: receives what --json prints.
    """
    facts.update(facts_of(result))
    console = console_of()
    console.print(_table(result))
    for line in _lines(result, what):
        console.print(
            textwrap.fill(line, _WIDTH, subsequent_indent="  "), markup=False, highlight=False
        )
    return result.first is None


def _table(result: Comparison) -> Table:
    table = Table()
    for name in ("what", "compared", "largest difference", "rounding explains", "result"):
        table.add_column(name, overflow="fold")
    for stage in result.stages:
        largest, allowed = (f"{value:.1e}" if value else "0" for value in stage.largest)
        table.add_row(stage.what, _count(stage), largest, allowed, _result(stage))
    return table


def _count(stage: StageResult) -> str:
    skipped = f", {len(stage.skipped)} skipped" * bool(stage.skipped)
    return f"{stage.compared} {stage.unit}{skipped}"


def _result(stage: StageResult) -> str:
    if stage.first is None:
        return "equal"
    label = "of each rank" if stage.is_noted else "DIFFERENT"
    return f"{label}: {stage.differing}, first {stage.first.name}"


def _lines(result: Comparison, what: str) -> list[str]:
    lines = []
    skipped = {name: why for stage in result.stages for name, why in stage.skipped.items()}
    if skipped:
        lines.append(f"{skipped_text(skipped)}.")
    if result.dropout:
        shown = ", ".join(result.dropout[:_SHOWN]) + ", ..." * (len(result.dropout) > _SHOWN)
        lines.append(
            f"Dropout is off in all runs ({shown}): its masks are others at each number of ranks."
        )
    blurred = [stage for stage in result.stages if stage.hidden > _BLURRED]
    if blurred:
        lines.append(
            f"Rounding hides differences below {blurred[0].hidden:.0%} in {blurred[0].what}:"
            " compare with float64=true, and without engine.param_dtype."
        )
    lines += [f"{note.stage}: {'; '.join(note.causes)}." for note in result.notes]
    first = result.first
    if first is None:
        return [*lines, f"EQUAL: {what} trains as one process does."]
    lines.append(
        f"FIRST DIFFERENCE: {first.stage}: {first.name}, by {first.relative:.2g} of its size;"
        f" rounding explains {first.allowed:.1g}."
    )
    lines += [f"Likely cause: {cause}." for cause in first.causes[:_SHOWN]]
    return [*lines, f"DIFFERENT: {what} does not train as one process does."]


def checked_run(of: str, engine: str, ranks: int) -> str:
    """Return how the checked run is named."""
    return f"{of} with {engine} on {plural(ranks, 'rank')}"
