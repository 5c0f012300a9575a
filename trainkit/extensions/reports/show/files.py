"""Reads what a run left in its folder:
metrics.csv (or .jsonl), config.yaml, manifests of checkpoints, goodput.json.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from trainkit.config.of_run import flat, read_config, read_overrides
from trainkit.errors import ConfigError
from trainkit.run.goal import FILE, FOLDER, Goal, goal_of_config
from trainkit.run.progress_file import Progress, read_progress
from trainkit.run.state import RunState, read_state
from trainkit.safety.masking import masked

Series = tuple[list[int], list[float]]  # steps, values
RATE = "throughput/samples_per_s"
# Folders of a run, which hold no other run.
_PARTS = {
    "checkpoints",
    "tensorboard",
    "timeline",
    "reports",
    "capsules",
    "predictions",
    "logs",
    "sweep",
}


def stage_of(name: str) -> tuple[str, str]:
    """Return a value's stage and its name there: ("val", "loss") of "val/loss" and of "val_loss";
    ("", name) of others.
    """
    match = re.match(r"(train|val|test)[/_](.+)", name)
    return (match[1], match[2]) if match else ("", name)


def main_values(known: Iterable[str], *stages: str) -> list[str]:
    """Return the values of these stages; without any those of training, without these all but
    rates and times.
    """
    names = {name: stage_of(name)[0] for name in known if not re.match(r"lr\b|throughput/", name)}
    chosen = [name for name, stage in names.items() if stage in stages]
    return chosen or [name for name, stage in names.items() if stage == "train"] or list(names)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of a run, from its manifest; `marks` are "best" and "last"."""

    name: str
    epoch: int
    step: int
    metrics: Mapping[str, float]
    written: datetime | None
    num_bytes: int
    global_batch_size: int | None
    marks: tuple[str, ...]


@dataclass(frozen=True)
class FinishedRun:
    """What a run left.

    Attributes:
        name: short, and unlike those of the other runs shown.
        folder: of the run.
        series: values by metric.
        epochs: epochs with values.
        checkpoints: by step.
        settings: the config, flat; empty for a run from Python code.
        goodput: seconds by purpose; empty without callbacks=goodput.
        overrides: the settings that were typed, as text.
        state: how far it is.
        progress: what rank 0 wrote last about the job, or None.
        not_finite: last values that are nan or infinite, by metric; `series` has finite ones alone.
        goal: what its sweep compares it by, or else what its callbacks monitor.
    """

    name: str
    folder: Path
    series: Mapping[str, Series]
    epochs: int
    checkpoints: Sequence[SavedCheckpoint] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    goodput: Mapping[str, float] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)
    state: RunState = RunState("-")
    progress: Progress | None = None
    not_finite: Mapping[str, float] = field(default_factory=dict)
    goal: Goal = Goal()

    @property
    def metrics(self) -> list[str]:
        """The names of the logged values."""
        return list(dict.fromkeys([*self.series, *self.not_finite]))

    @property
    def steps(self) -> int:
        """The last step with a value or a checkpoint."""
        ends = [steps[-1] for steps, _ in self.series.values()] + [
            saved.step for saved in self.checkpoints
        ]
        return max(ends, default=0)

    @property
    def task(self) -> str:
        """The Task's class; "" if unknown."""
        named = self.progress.task if self.progress else ""
        return named or str(self.settings.get("task._target_") or "").rpartition(".")[2]

    @property
    def ranks(self) -> int | None:
        """The number of ranks, the last one; None if unknown."""
        return self.progress.ranks if self.progress else None

    @property
    def global_batch_size(self) -> int | None:
        """The samples of a step on all ranks, as of the last checkpoint; None if unknown."""
        return self.checkpoints[-1].global_batch_size if self.checkpoints else None

    def last(self, name: str) -> float | None:
        """Return the last value of a metric, finite or not."""
        if name in self.not_finite:
            return self.not_finite[name]
        return self.series[name][1][-1] if name in self.series else None

    def rates(self) -> Series:
        """Return samples per second: logged by callbacks=throughput,
        or else from the times of the checkpoints.
        """
        if RATE in self.series:
            return self.series[RATE]
        timed = [
            saved
            for saved in self.checkpoints
            if saved.written is not None and saved.global_batch_size
        ]
        steps = []
        values = []
        for before, after in zip(timed, timed[1:], strict=False):
            assert (
                before.written is not None
                and after.written is not None
                and after.global_batch_size is not None
            )
            seconds = (after.written - before.written).total_seconds()
            if seconds > 0 and after.step > before.step:
                steps.append(after.step)
                values.append((after.step - before.step) * after.global_batch_size / seconds)
        return steps, values

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of all ranks: the median of `rates`, or else of the last minute."""
        if values := sorted(self.rates()[1]):
            return values[len(values) // 2]
        return self.progress.samples_per_s if self.progress else None


def read_runs(folders: Sequence[Path]) -> list[FinishedRun]:
    """Read runs, each with a short name of its own; that of a sweep's is not a number alone.

    Raises:
        ConfigError: a folder is no run, or is named twice.
    """
    absolute = [folder.absolute() for folder in folders]
    for folder in absolute:
        if not folder.is_dir():
            raise ConfigError(
                f"There is no folder {folder}. Give a run's folder, for example"
                " runs/resnet50/<time>."
            )
    if len(set(absolute)) < len(absolute):
        raise ConfigError("A run is named twice. Leave one out.")
    depth = 1
    while len({folder.parts[-depth:] for folder in absolute}) < len(absolute):
        depth += 1
    parts = [folder.parts[-depth - folder.parts[-depth].isdigit() :] for folder in absolute]
    return [_read_logged(*run) for run in zip(absolute, map("/".join, parts), strict=True)]


def find_runs(top: Path) -> list[FinishedRun]:
    """Return all runs in and below a folder by their paths below it,
    also those that failed before they logged a value.
    """
    folders = [Path(folder) for folder, names, files in os.walk(top) if _is_run(names, files)]
    named = {
        folder: folder.relative_to(top).as_posix() if folder != top else top.name
        for folder in folders
    }
    return [
        read_any(folder, named[folder]) for folder in sorted(named, key=lambda f: natural(named[f]))
    ]


def _is_run(names: list[str], files: list[str]) -> bool:
    """Return whether a folder with these subfolders and files is a run's;
    remove subfolders that hold none from `names`.
    """
    is_run = bool(
        {"state.json", "metrics.csv", "metrics.jsonl"} & {*files} or "checkpoints" in names
    )
    names[:] = [
        name for name in names if name not in _PARTS and not name.startswith((".", "before-"))
    ]
    return is_run


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts run 9 before run 10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def _read_logged(folder: Path, name: str) -> FinishedRun:
    run = read_any(folder, name)
    if not run.series and not run.checkpoints:
        raise ConfigError(
            f"{folder} has neither metrics.csv, nor metrics.jsonl, nor checkpoints: it is no run's"
            " folder, or nothing was logged yet. Train with logger=csv (the default)."
        )
    return run


def read_any(folder: Path, name: str) -> FinishedRun:
    """Read one run, also one that has logged nothing."""
    rows = list(_rows(folder))
    checkpoints = read_checkpoints(folder / "checkpoints")
    series: dict[str, Series] = {}
    latest: dict[str, float] = {}
    for _, step, values in rows:
        latest |= values
        for metric, value in values.items():
            if math.isfinite(value):
                steps, held = series.setdefault(metric, ([], []))
                steps.append(step)
                held.append(value)
    epochs = {epoch for epoch, _, _ in rows} | {saved.epoch for saved in checkpoints}
    config = folder / "config.yaml"
    settings = flat(masked(read_config(config))) if config.is_file() else {}
    about = (
        settings,
        _seconds(folder),
        read_overrides(folder),
        read_state(folder),
        read_progress(folder),
        {name: value for name, value in latest.items() if not math.isfinite(value)},
        read_goal(folder.parent) or goal_of_config(settings),
    )
    return FinishedRun(name, folder, series, max(epochs, default=-1) + 1, checkpoints, *about)


def _seconds(folder: Path) -> dict[str, float]:
    try:
        held = json.loads((folder / "goodput.json").read_text())["seconds"]
        return {purpose: float(seconds) for purpose, seconds in held.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # of a run without the callback, or damaged


def _rows(folder: Path) -> Iterator[tuple[int, int, dict[str, float]]]:
    """Yield (epoch, step, values) of each complete row."""
    if (folder / "metrics.csv").is_file():
        with (folder / "metrics.csv").open(newline="", errors="replace") as file:
            for row in csv.DictReader(line for line in file if "\0" not in line):
                if (
                    (row.get("step") or "").isdigit()
                    and (row.get("epoch") or "").isdigit()
                    and None not in row
                ):
                    values = {
                        name: text
                        for name, text in row.items()
                        if name not in ("epoch", "step") and text
                    }
                    yield int(row["epoch"]), int(row["step"]), _numbers(values)
    elif (folder / "metrics.jsonl").is_file():
        for line in (folder / "metrics.jsonl").read_text(errors="replace").splitlines():
            try:
                held = json.loads(line)
                values = {**held["values"], **held.get("nonfinite", {})}
                read = int(held["epoch"]), int(held["step"]), _numbers(values)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # cut by a crash
            yield read


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers; without cells that another program or a damaged disk has filled."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        with contextlib.suppress(ValueError, TypeError):
            numbers[name] = float(value)
    return numbers


def read_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Return the checkpoints in a folder, by step; damaged ones are left out."""
    marks: dict[Path, list[str]] = {}
    for mark in ("best", "last"):
        if (folder / mark).exists():
            marks.setdefault((folder / mark).resolve(), []).append(mark)
    checkpoints = []
    for path in sorted(folder.glob("*/manifest.json")):
        if path.parent.is_symlink() or path.parent.name.startswith("."):  # a mark, or a draft
            continue
        try:
            manifest = json.loads(path.read_text())
            checkpoints.append(
                _checkpoint(path.parent, manifest, tuple(marks.get(path.parent.resolve(), ())))
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # deleted by the job that runs there, or damaged: `fit` names it when it is loaded
            continue
    return sorted(checkpoints, key=lambda saved: saved.step)


def _checkpoint(
    folder: Path, manifest: Mapping[str, Any], marks: tuple[str, ...]
) -> SavedCheckpoint:
    plan = manifest.get("contract") or {}
    sizes = [plan.get(name) for name in ("batch_size", "world_size", "accumulate")]
    written = datetime.fromisoformat(manifest["written"]) if manifest.get("written") else None
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    batch = None if None in sizes else math.prod(sizes)  # type: ignore[arg-type]
    metrics = {name: float(value) for name, value in (manifest.get("metrics") or {}).items()}
    return SavedCheckpoint(
        folder.name,
        manifest["epoch"],
        manifest["global_step"],
        metrics,
        written,
        num_bytes,
        batch,
        marks,
    )


def read_goal(folder: Path) -> Goal | None:
    """Return what the sweep or search in a folder compares by; None without one."""
    try:
        held = json.loads((folder / FOLDER / FILE).read_text())
        metric, mode = (None if held[key] is None else str(held[key]) for key in ("metric", "mode"))
        return Goal(metric, mode, tuple(map(str, held["start"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None
