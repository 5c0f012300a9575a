"""check-resume: compares the killed and resumed run with the uninterrupted one, and gives the
verdict.

same_problem   the settings that keep the global batch and the rates at another number of ranks
report         compares the two runs' ends, their logged values and their samples, and prints a table
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from trainkit.console import console_of, plural
from trainkit.errors import ConfigError
from trainkit.extensions.check_resume.compare import (
    BOUNDS,
    ComparedPart,
    Names,
    compare,
    differences,
    unsteady,
)
from trainkit.extensions.plan.planned import planned
from trainkit.extensions.script.subject import Subject

Row = dict[str, str]
Note = dict[str, Any]


@dataclass(frozen=True)
class Runs:
    """The outputs of the three runs."""

    whole: Path  # run folder of the uninterrupted run
    killed: Path  # run folder of the run that was killed and resumed
    # folder of ResumeRecorder's records, with a folder each for whole, killed and resumed
    notes: Path
    save_at: int  # both runs saved after this step
    kill_at: int  # the step in which one was killed
    ranks: tuple[int, int]  # number of ranks before and after
    engine: str | None = None  # the resumed run's, if it has another one


def same_problem(subject: Subject, run_dir: str, ranks: int) -> dict[str, Any]:
    """Return the Trainer's settings that make a fit the same problem at `ranks` ranks as at the
    launcher's.

    Args:
        subject: the fit.
        run_dir: a temporary folder.
        ranks: the other number of ranks.

    Raises:
        ConfigError: no settings can do that; the message has the reason.
    """
    with planned(subject, run_dir) as planned_run:
        contract = planned_run.run.batch_plan
    if contract.later or contract.batch_size is None or contract.global_batch_size is None:
        why = (
            "the accumulation changes by epoch"
            if contract.later
            else "the training data are batches of unknown size"
        )
        raise ConfigError(
            f"ranks names two numbers, and {why}: the steps would not be the same. Give one number:"
            " ranks=2"
        )
    size = contract.global_batch_size
    if size % (contract.batch_size * ranks):
        raise ConfigError(
            f"ranks is {contract.world_size},{ranks}, but the {size} samples of a step at"
            f" {contract.world_size} ranks cannot be divided among {ranks} ranks in microbatches of"
            f" {contract.batch_size}. Change data.batch_size or ranks."
        )
    settings = {"global_batch_size": size, "accumulate_grad_batches": None}
    if contract.lr_scaling != "none" and contract.lr_reference_batch_size is None:
        settings["lr_reference_batch_size"] = contract.batch_size * contract.accumulate
    return settings


def report(runs: Runs, facts: dict[str, Any]) -> bool:
    """Compare and print; return whether the resumed run ended like the uninterrupted one.

    Args:
        runs: their outputs.
        facts: receives what --json prints.
    """
    facts |= {"equal": False, "kill_at": runs.kill_at, "save_at": runs.save_at}
    facts |= {"ranks": list(runs.ranks), "before_the_kill": None, "parts": []}
    recorded = json.loads((runs.notes / "whole" / "names.json").read_text())
    names = Names(frozenset(recorded["parameters"]), recorded["optimizers"])
    saved = [
        run / "checkpoints" / f"check-resume-step={runs.save_at}"
        for run in (runs.whole, runs.killed)
    ]
    console = console_of()
    if before := _before(saved, names):
        facts["before_the_kill"] = before
        console.print(
            "DIFFERENT, but not because of the resume: two runs of the same settings already"
            f" differ at step {runs.save_at}, before the kill. {before}\nThe resume cannot be"
            " judged until they are equal. Look for random numbers that seed does not control, and"
            " try trainer.deterministic=true.",
            markup=False,
            soft_wrap=True,
        )
        return False
    rounding = runs.ranks[0] != runs.ranks[1] or runs.engine is not None
    ignored = unsteady(*saved)
    ends = [runs.notes / run / "end" for run in ("whole", "resumed")]
    parts = compare(*ends, rounding=rounding, names=names, ignored=ignored)
    tables = [_table_of(run) for run in (runs.whole, runs.killed)]
    notes = [
        _notes(runs.notes / run, ranks)
        for run, ranks in zip(("whole", "resumed"), runs.ranks, strict=True)
    ]
    parts += [
        logged_values(tables[0], tables[1], runs.save_at, rounding),
        samples(notes[0], notes[1], rounding),
    ]
    facts["parts"] = [_facts_of(part) for part in parts]
    console.print(_table(parts))
    if ignored:
        console.print(
            f"Not compared, because they differ before the kill too (times?): {', '.join(ignored)}",
            markup=False,
        )
    if rounding:
        shares = ", ".join(
            f"{bound:g} ({str(dtype).removeprefix('torch.')})" for dtype, bound in BOUNDS.items()
        )
        console.print(
            f"Equal after this change: within a fraction of a tensor's largest element: {shares}.",
            markup=False,
        )
    different = [part.what for part in parts if part.first is not None]
    console.print(_verdict(runs, different, rounding), markup=False, soft_wrap=True)
    facts["equal"] = not different
    return not different


def _facts_of(part: ComparedPart) -> dict[str, Any]:
    return {
        "what": part.what,
        "compared": part.count,
        "unit": part.unit,
        "first_difference": part.first,
        "left_out": part.left_out,
    }


def logged_values(
    whole: Sequence[Row], resumed: Sequence[Row], save_at: int, rounding: bool
) -> ComparedPart:
    """Compare two tables of metrics, text by text.

    Columns that already differ in rows before the kill, when neither run was resumed, hold times
    and are skipped.
    """
    if rounding:
        return ComparedPart(
            "logged values", 0, "rows", left_out="step values belong to rank 0's share"
        )
    early = [[row for row in rows if int(row["step"]) <= save_at] for rows in (whole, resumed)]
    pairs = list(zip(*early, strict=False))
    columns = list(dict.fromkeys(name for row in [*whole, *resumed] for name in row))
    left = [name for name in columns if any(a.get(name) != b.get(name) for a, b in pairs)]
    why = f"without {', '.join(left)}, which differ before the kill too" if left else None
    for number, (a, b) in enumerate(zip(whole, resumed, strict=False), 1):
        for name in columns:
            if name not in left and a.get(name) != b.get(name):
                first = (
                    f"row {number} (step {a['step']}), {name}: '{a.get(name, '')}' and"
                    f" '{b.get(name, '')}'"
                )
                return ComparedPart("logged values", len(whole), "rows", first, why)
    if len(whole) != len(resumed):
        return ComparedPart(
            "logged values", len(whole), "rows", f"{len(whole)} rows and {len(resumed)} rows", why
        )
    return ComparedPart("logged values", len(whole), "rows", None, why)


def samples(
    whole: Sequence[Sequence[Note]], resumed: Sequence[Sequence[Note]], rounding: bool
) -> ComparedPart:
    """Compare the samples of each rank in each step; at another number of ranks, those of all ranks
    together.

    Args:
        whole: the records of each rank of the uninterrupted run.
        resumed: those of the resumed run, from its first step on.
        rounding: the number of ranks differs.
    """
    what = "samples"
    unit = "samples"
    sides = [
        {(note["step"], rank): note for rank, notes in enumerate(ranks) for note in notes}
        for ranks in (whole, resumed)
    ]
    steps = sorted({step for step, _ in sides[1]})
    count = sum(len(note["samples"]) for note in sides[1].values())
    for step in steps:
        here = [[note for (at, _), note in sorted(side.items()) if at == step] for side in sides]
        for key in ("indices", "samples"):
            values = [[note[key] for note in notes] for notes in here]
            if rounding:
                values = [
                    [sorted(item for own in side if own is not None for item in own)]
                    for side in values
                ]
            for rank, (a, b) in enumerate(zip(*values, strict=False)):
                if a != b:
                    where = "" if rounding else f" of rank {rank}"
                    return ComparedPart(
                        what, count, unit, f"step {step}{where}: {_unlike(key, a or [], b or [])}"
                    )
            if len(values[0]) != len(values[1]):
                return ComparedPart(
                    what,
                    count,
                    unit,
                    f"step {step}: of {len(values[0])} ranks and of {len(values[1])}",
                )
    return ComparedPart(what, count, unit, None if steps else "the resumed run trained no step")


def _unlike(key: str, a: Sequence[Any], b: Sequence[Any]) -> str:
    if key == "indices":
        place = next(
            (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )
        return (
            f"indices {list(a)[place : place + 4]}... and {list(b)[place : place + 4]}..., from"
            f" place {place} on"
        )
    return (
        "the same indices, and other data (augmentation?) in"
        f" {sum(x != y for x, y in zip(a, b, strict=False))} of {len(a)}"
    )


def _before(saved: Sequence[Path], names: Names | None) -> str | None:
    """Describe the first difference of two runs before the kill, or return None."""
    texts = [
        part.first
        for part in differences(*saved, names=names)
        if part.what not in ("callbacks", "kept by hooks")
    ]
    return f"{texts[0]}." if texts else None


def _table_of(run: Path) -> list[Row]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _notes(folder: Path, ranks: int) -> list[list[Note]]:
    texts = [(folder / f"rank{rank}.jsonl").read_text() for rank in range(ranks)]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


def _table(parts: Sequence[ComparedPart]) -> Table:
    table = Table()
    for name in ("what", "compared", "result"):
        table.add_column(name, overflow="fold")
    for part in parts:
        if part.left_out is not None and not part.count:
            table.add_row(part.what, "-", f"not compared: {part.left_out}")
            continue
        result = "equal" if part.first is None else f"FIRST DIFFERENCE: {part.first}"
        table.add_row(
            part.what,
            f"{part.count:,} {part.unit}",
            result + (f" ({part.left_out})" if part.left_out else ""),
        )
    return table


def _verdict(runs: Runs, different: Sequence[str], rounding: bool) -> str:
    there = f" on {plural(runs.ranks[1], 'rank')}" * rounding + f" with engine={runs.engine}" * (
        runs.engine is not None
    )
    what = f"the run that was killed in step {runs.kill_at} and resumed{there}"
    if not different:
        return f"EQUAL: {what} ended like the uninterrupted run."
    hint = (
        " Dropout, and batch norm without trainer.sync_batchnorm, depend on the number of ranks,"
        " with or without a kill."
        if rounding
        else (
            " State of a Task outside of its parameters and buffers is lost in a restart: put it"
            " into a buffer, or into on_save_checkpoint and on_load_checkpoint."
        )
    )
    return (
        f"DIFFERENT: {what} did not end like the uninterrupted run, in"
        f" {', '.join(different)}.{hint}"
    )
