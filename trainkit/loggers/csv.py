"""CSVLogger: metrics.csv, with a row for each log step and a column for each name."""

from __future__ import annotations

import csv
from typing import Any, ClassVar

from trainkit.api.lightning_arguments import nothing, unset
from trainkit.console import cell
from trainkit.loggers.base import RunFacts
from trainkit.loggers.rows import RowLogger
from trainkit.safety.whole_files import replacing


class CSVLogger(RowLogger):
    """Writes `<run_dir>/metrics.csv`, or `<save_dir>/<name>/<version>/metrics.csv`; a resumed run
    appends to it.

    A new name adds a column: the file is then rewritten and replaced atomically.
    """

    role = "metrics_table"
    taken_arguments: ClassVar = {"flush_logs_every_n_steps": nothing} | unset("CSVLogger")

    def open(self, run: RunFacts) -> None:
        """Read the rows of an earlier start of this run,
        drop those of steps that are repeated, and append.
        """
        self.path = self.place.make(run.run_dir) / "metrics.csv"
        self._columns: list[str] = ["epoch", "step"]
        self._rows: list[dict[str, object]] = []
        if self.path.is_file():
            with self.path.open(newline="") as file:
                # NUL bytes are left by a power failure
                reader = csv.DictReader(line for line in file if "\0" not in line)
                reader.fieldnames = [_name(text) for text in reader.fieldnames or self._columns]
                rows = [dict(row) for row in reader if _is_whole(row)]
            self._rows = [row for row in rows if self.sieve(int(row["step"]))]
            if not self.was_of_another_run(run, len(rows), len(self._rows)):
                self._columns = list(reader.fieldnames)
        self._rewrite()

    def write_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        row: dict[str, object] = {"epoch": epoch, "step": step, **metrics}
        self._rows.append(row)
        new = [name for name in metrics if name not in self._columns]
        if new:
            self._columns += new
            self._rewrite()
            return
        self._writer.writerow(row)

    def _rewrite(self) -> None:
        if self._file is not None:
            self._file.close()
        with replacing(self.path) as draft, draft.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            csv.writer(file).writerow(map(cell, self._columns))
            writer.writerows(self._rows)
        self._file = self.path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, self._columns)


def _name(header: str) -> str:
    """Return the metric's name of a header that `cell` may have quoted."""
    return header[1:] if header.startswith("'") and cell(header[1:]) == header else header


def _is_whole(row: dict[str, Any]) -> bool:
    """Return whether a row is complete:
    it has a step, and no more fields than columns (the reader's key None).
    """
    return (row.get("step") or "").isdigit() and None not in row
