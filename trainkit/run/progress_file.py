"""progress.json in a run's folder: what the fit does now, for `trainkit status`. Imports no torch.

Rank 0 writes it every `EVERY_S` seconds (progress_writer.py) and at the end; docs/logging.md
describes its keys. Between two generations of an elastic job it holds how the last attempt ended.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from trainkit.launch.moments import Moment
from trainkit.safety.whole_files import replacing

FILE = "progress.json"
EVERY_S = 2.0
MOST_STARTS = 50  # the newest ones; `num_starts` counts all


@dataclass(frozen=True)
class FitStart:
    """One start of the fit, or one change of its ranks.

    Attributes:
        unix_s: when, by rank 0's clock.
        step: optimizer steps taken before.
        ranks: their number.
        how: "start", "resume" (from a checkpoint) or "recovery" (from memory: an elastic job's
            ranks changed).
    """

    unix_s: float
    step: int
    ranks: int
    how: str


@dataclass
class Progress:
    """The file's content.

    Attributes:
        written: when.
        host, pid, birth: rank 0's process; `birth` is unlike that of a later one with its number.
        phase: "training" or "validating".
        ended: how the fit, or an elastic job's attempt, ended: "done", "stopped" (a signal, with a
            checkpoint), "failed", "ranks changed"; "" while it runs.
        error: the error of a failed one.
        job: start time of an elastic job; "" for another job.
        task: the Task's class.
        engine, launcher: names.
        driver: address and port of the elastic job's driver, or "".
        hosts: rank numbers by host, in the order of the ranks.
        step, epoch, step_in_epoch: optimizer steps and passes completed.
        steps_in_epoch, total_steps, max_epochs: None if unknown or without limit.
        samples: trained on since the run's beginning.
        steps_per_s, samples_per_s: of the last minute; None before the second step.
        seconds_left: by this attempt's rate, validations included.
        waiting_for: what rank 0 waits for the other ranks with; "" if it does not.
        still_s: seconds since rank 0 last began a microbatch, ended a step or began another phase.
        checkpoints: folders or URLs of the checkpoints.
        prometheus: address of the metrics that rank 0 serves, or "".
        starts, num_starts: the newest starts, and the number of all.
    """

    written: Moment
    host: str
    pid: int
    birth: str | None
    phase: str = "training"
    ended: str = ""
    error: str = ""
    job: str = ""
    task: str = ""
    engine: str = ""
    launcher: str = "none"
    driver: str = ""
    hosts: dict[str, list[int]] = field(default_factory=dict)
    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    steps_in_epoch: int | None = None
    total_steps: int | None = None
    max_epochs: int | None = None
    samples: int = 0
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    seconds_left: float | None = None
    waiting_for: str = ""
    still_s: float = 0.0
    checkpoints: list[str] = field(default_factory=list)
    prometheus: str = ""
    starts: list[FitStart] = field(default_factory=list)
    num_starts: int = 0

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.hosts.values()))


def write_progress(run_dir: Path, progress: Progress) -> None:
    """Write the file, atomically.

    Raises:
        OSError: the disk is full, or gone.
    """
    with replacing(run_dir / FILE) as draft:
        draft.write_text(json.dumps(asdict(progress), indent=1) + "\n")


def read_progress(run_dir: Path) -> Progress | None:
    """Return the file's content; None if there is none,
    or if another version of trainkit wrote one that cannot be read.
    """
    try:
        content: dict[str, Any] = json.loads((run_dir / FILE).read_text())
        names = {one.name for one in fields(Progress)}
        known = {key: value for key, value in content.items() if key in names}
        known["written"] = Moment(**known["written"])
        known["starts"] = [FitStart(**start) for start in known.get("starts", [])]
        return Progress(**known)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
