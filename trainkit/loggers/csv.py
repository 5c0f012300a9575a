"""metrics.csv: a row for each time numbers were logged, a column for each name."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trainkit.loggers.base import Logger

if TYPE_CHECKING:
    from trainkit.task import Task
    from trainkit.trainer import Trainer


class CSVLogger(Logger):
    """Writes `<run_dir>/metrics.csv`; a run that goes on appends to it.

    Each row is on disk as soon as it is logged. A name that is met for the first time widens the table: the file is
    then written anew, and replaced in one move.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, object]] = []
        self._kept: int | None = None  # rows that the checkpoint knows of

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Forget an earlier run."""
        if stage == "fit":
            self._rows, self._kept = [], None

    def state_dict(self) -> dict[str, Any]:
        """Return how many rows there are: some that follow are of the same step."""
        return {"rows": len(self._rows)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember it until the file is opened."""
        self._kept = state_dict["rows"]

    def open(self, trainer: Trainer) -> None:
        """Read what an earlier part of this run wrote, leaving out what is trained anew, and go on behind it."""
        self.path = Path(trainer.run_dir) / "metrics.csv"
        self._columns: list[str] = ["epoch", "step"]
        if self.path.is_file():
            with self.path.open(newline="") as file:
                reader = csv.DictReader(file)
                self._rows = [dict(row) for row in reader if _is_whole(row) and int(row["step"]) <= trainer.global_step]
                self._rows = self._rows[: self._kept]
                self._columns = list(reader.fieldnames or self._columns)
        self._file: TextIO | None = None
        self._rewrite()

    def log_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        """Write a row."""
        row: dict[str, object] = {"epoch": epoch, "step": step, **metrics}
        self._rows.append(row)
        new = [name for name in metrics if name not in self._columns]
        if new:
            self._columns += new
            self._rewrite()
            return
        assert self._file is not None
        self._writer.writerow(row)
        self._file.flush()

    def finalize(self, status: str) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _rewrite(self) -> None:
        if self._file is not None:
            self._file.close()
        draft = self.path.with_suffix(".csv.draft")
        with draft.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(self._rows)
        draft.replace(self.path)
        self._file = self.path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, self._columns)


def _is_whole(row: dict[str, Any]) -> bool:
    """Whether a row was not torn by a crash: it has a step, and no more fields than columns (the reader's key None)."""
    return (row.get("step") or "").isdigit() and None not in row
