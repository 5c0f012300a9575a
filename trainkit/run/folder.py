"""The folder of a run: created, and checked to be writable, before training."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

from trainkit.errors import ConfigError
from trainkit.launch.environment import job_started

LEDGER = "goodput.json"
# A run's files, which a new run in the folder must not find.
_OF_A_RUN = ("checkpoints", "metrics.csv", "metrics.jsonl", "tensorboard", LEDGER, "timeline", "reports", "capsules")


def make_run_dir(requested: str | Path | None, task_name: str) -> Path:
    """Return the folder; creates it if needed.

    Args:
        requested: the folder; None for a new folder runs/<task_name>/<time> below the current one. In an elastic job, which
            ranks may join later, the time is the job's.
        task_name: the Task's class.

    Raises:
        ConfigError: it cannot be written to.
    """
    try:
        if requested is None and (started := job_started()):
            requested = Path("runs", task_name, started)
        if requested is None:
            return _new_folder(Path("runs", task_name, time.strftime("%Y-%m-%d_%H-%M-%S")).absolute())
        folder = Path(requested).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        shown = f"'{requested}'" if requested is not None else "null (runs/ below the current folder)"
        raise ConfigError(f"run_dir is {shown}, which cannot be written: {error.strerror}. Give another folder.") from error
    return folder


def _new_folder(path: Path) -> Path:
    """Make a folder that no other run has: two may start in the same second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(2):
        try:
            path.mkdir()
        except FileExistsError:
            path = path.with_name(f"{path.name.partition('.')[0]}.{number}")
        else:
            break
    return path


def set_aside(run_dir: Path) -> None:
    """Move an earlier run's files in the folder to `before-<time>/` in it, and report it. Nothing is mixed or lost."""
    there = [run_dir / name for name in _OF_A_RUN if (run_dir / name).exists()]
    there = [path for path in there if path.name != LEDGER or not _is_of_this_job(path)]  # it counts what the job has lost
    if not any(path.name != "tensorboard" for path in there):
        return
    place = _new_folder(run_dir / f"before-{time.strftime('%Y-%m-%d_%H-%M-%S')}")
    for path in there:
        path.rename(place / path.name)
    print(f"{run_dir} held an earlier run; its files are in {place.name}/ now. To resume it: ckpt_path=last", flush=True)


def _is_of_this_job(ledger: Path) -> bool:
    """Return whether an elastic job that lost all workers before its first checkpoint has begun this ledger."""
    try:
        return bool(job_started()) and json.loads(ledger.read_text())["job"] == job_started()
    except (OSError, ValueError, KeyError, TypeError):
        return False
