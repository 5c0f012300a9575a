"""What differs between runs: their ranks, their global batch, and a row for each setting that
makes a difference.

No row for: a setting of the run's own folder, a group that the task refers to a second time
(task.optimizer.lr beside optimizer.lr), one number written in two ways, null beside nothing, and the
defaults of a part that another run does not have (one row names the part).
"""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.extensions.reports.grid import Grid
from trainkit.extensions.reports.show.files import FinishedRun

ABSENT = "-"
_NOT_COMPARED = ("run_dir", "conf")
_MOST_SETTINGS = 60
_TARGET = "._target_"


def settings_grid(runs: Sequence[FinishedRun]) -> Grid | None:
    """Return ranks, global batch and settings that differ between runs; None if there are none."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in _NOT_COMPARED)
    parts = [
        key.removesuffix(_TARGET)
        for key in keys
        if key.endswith(_TARGET) and any(key not in run.settings for run in runs)
    ]
    typed = {key for run in runs for key in run.overrides}
    values: dict[str, list[str]] = {}
    for key in keys:
        part = next((part for part in parts if key.startswith(f"{part}.")), None)
        if part is None or key in typed:
            values[key] = [_text(run, key) for run in runs]
        elif key == f"{part}{_TARGET}":
            values[part] = [_text(run, key).rpartition(".")[2] for run in runs]
    differ = {key: shown for key, shown in values.items() if len({*map(_same, shown)}) > 1}
    rows = _of_ranks(runs) + [
        (key, *shown)
        for key, shown in differ.items()
        if not key.startswith("task.") or differ.get(key.removeprefix("task.")) != shown
    ]
    columns = ("", *(run.name for run in runs))
    sentences = tuple(range(1, len(columns)))
    return Grid("", columns, rows[:_MOST_SETTINGS], sentences, is_code=True) if rows else None


def _of_ranks(runs: Sequence[FinishedRun]) -> list[tuple[str, ...]]:
    """Return a row for each of what is no setting and differs; unknown ones differ from none."""
    known = {
        "ranks": [run.ranks for run in runs],
        "global batch": [run.global_batch_size for run in runs],
    }
    return [
        (name, *(ABSENT if number is None else f"{number:,}" for number in numbers))
        for name, numbers in known.items()
        if len({*numbers} - {None}) > 1
    ]


def _text(run: FinishedRun, key: str) -> str:
    value = run.settings.get(key)
    return ABSENT if value is None else str(value).replace(str(run.folder), "<run_dir>")


def _same(text: str) -> str | float:
    """Return what is equal for two texts that mean one value."""
    try:
        return float(text)
    except ValueError:
        return text
