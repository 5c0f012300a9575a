"""JSONLLogger: metrics.jsonl, with a JSON object per line for each log step."""

from __future__ import annotations

import json
import math
from typing import Any

from trainkit.loggers.base import RunFacts
from trainkit.loggers.rows import RowLogger
from trainkit.safety.whole_files import replacing


class JSONLLogger(RowLogger):
    """Writes `<run_dir>/metrics.jsonl`; a resumed run appends to it. Strict parsers can read each
    line:

        {"step": 50, "epoch": 0, "time": 1795280505.17, "values": {"train/loss": 0.25, "lr": 0.1}}
        {"step": 51, ..., "values": {"train/loss": null, "lr": 0.1}, "nonfinite": {"train/loss":
        "nan"}}

    `time` is in seconds since 1970. JSON has no non-finite numbers: such a value is null, and
    `nonfinite`, present only then, holds it as text: "nan", "inf" or "-inf".
    """

    def open(self, run: RunFacts) -> None:
        """Drop the lines of steps that are repeated from the file of an
        earlier start of this run, and append.
        """
        self.path = self.place.make(run.run_dir) / "metrics.jsonl"
        with replacing(self.path) as draft, draft.open("w") as file:
            rows = retained = 0
            if self.path.is_file():
                with self.path.open(errors="replace") as before:
                    for line in before:
                        if (step := _step_of(line)) is None:
                            continue
                        rows += 1
                        if self.sieve(step):
                            retained += 1
                            file.write(line)
            self.was_of_another_run(run, rows, retained)
        self._file = self.path.open("a")

    def write_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        assert self._file is not None
        numbers = {name: float(value) for name, value in metrics.items()}
        strange = {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}
        line: dict[str, Any] = {"step": step, "epoch": epoch, "time": round(self.logged_at, 3)}
        line["values"] = {
            name: None if name in strange else value for name, value in numbers.items()
        }
        if strange:
            line["nonfinite"] = strange
        self._file.write(json.dumps(line, allow_nan=False) + "\n")


def _step_of(line: str) -> int | None:
    """Return the step of a line, or None if the line is incomplete after a crash."""
    try:
        step = json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
