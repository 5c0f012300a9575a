"""state.json in a run's folder: how far the run is, for tables of runs. Imports no torch.

running   a process trains, or was killed before it could write anything else (`read_state` distinguishes them)
done      training ended
stopped   a signal ended it, with a checkpoint
failed    an error ended it
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from trainkit.run.lock import is_held

STATE = "state.json"


@dataclass(frozen=True)
class RunState:
    """The state of a run, and its error if it failed."""

    name: str
    error: str = ""


def write_state(run_dir: Path, name: str, error: str = "") -> None:
    """Write the state of a run, atomically."""
    about = {
        "state": name,
        "error": error,
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    partial = run_dir / f"{STATE}.part"
    partial.write_text(json.dumps(about) + "\n")
    os.replace(partial, run_dir / STATE)


def read_state(run_dir: Path) -> RunState:
    """Return a run's state: what it wrote, "killed" if its process ended without a word,
    "-" if it never wrote any.
    """
    try:
        about = json.loads((run_dir / STATE).read_text())
        name, error = str(about["state"]), str(about.get("error", ""))
    except (OSError, ValueError, KeyError, TypeError):
        return RunState("running" if is_held(run_dir) else "-")
    return RunState("killed" if name == "running" and not is_held(run_dir) else name, error)
