"""RowLogger: base of the loggers that write a row per log step into a file of the run's folder."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import yaml  # type: ignore[import-untyped]

from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import checked
from trainkit.console import info, short
from trainkit.loggers.base import Logger, RunFacts
from trainkit.loggers.media_files import write_media
from trainkit.loggers.place import LoggerPlace, Placed
from trainkit.metrics.media import Media


@checked
class RowLogger(Placed, Logger):
    """Determines which rows of an existing file to retain in a resumed run, and which belong to
    repeated steps.

    Args:
        save_dir: a folder in place of the run's own; see Place.
        name: a folder below it.
        version: the run's folder below that.

    Attributes:
        sieve: for `open`: returns whether a row is retained.
    """

    settles = True
    stores_media = True
    path: Path  # of the file
    _file: TextIO | None = None

    def __init__(
        self, save_dir: str | None = None, name: str | None = None, version: int | str | None = None
    ) -> None:
        self.place = LoggerPlace(save_dir, name, version)
        self._forget()

    def _forget(self) -> None:
        self._last_step = -1
        self._rows_of_step = 0
        self._knows = False

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        super().setup(trainer, task, stage)
        if stage == "fit":
            self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the last step with rows, and their number:
        later rows may belong to the same step.
        """
        return {"step": self._last_step, "rows_of_step": self._rows_of_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until the file is opened. The state of an older trainkit is ignored."""
        if "step" in state_dict:
            self._last_step = state_dict["step"]
            self._rows_of_step = state_dict["rows_of_step"]
            self._knows = True

    def log_media(self, media: Media, step: int) -> None:
        write_media(self.path.parent / "media", media, step)

    def was_of_another_run(self, run: RunFacts, rows: int, retained: int) -> bool:
        """Rename the file that is there if a new run retains none of its rows, and report it: in a
        folder that several runs may have, it is another run's. Return whether it was.
        """
        if self.place.save_dir is None or run.resumes or not rows or retained:
            return False
        now = time.strftime("%Y-%m-%d_%H-%M-%S")
        names = (f"before-{now}-{number}-{self.path.name}" for number in itertools.count(1))
        places = map(self.path.with_name, names)
        before = self.path.rename(next(place for place in places if not place.exists()))
        info(
            f"{short(self.path)} was another run's, and is {before.name} now. For a folder for each"
            " run give the logger a version, or leave save_dir out."
        )
        return True

    def taken(self, step: int) -> None:
        if step > self._last_step:
            self._last_step = step
            self._rows_of_step = 0
        self._rows_of_step += step == self._last_step

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        """Fix which rows are retained, before a new row is queued; the thread opens the file."""
        known = Sieve(self._last_step, self._rows_of_step)
        self.sieve = known if self._knows else Sieve(trainer.global_step, None)
        super().on_fit_start(trainer, task)

    def start(self, trainer: RunView, task: Task, follows: bool) -> None:
        if follows:
            self.sieve = Sieve(sys.maxsize, None)
        super().start(trainer, task, follows)

    def write_hyperparams(self, params: dict[str, Any]) -> None:
        """Write those of `log_hyperparams` as Lightning does; the run's own are in its folder."""
        if self.given_hparams:
            plain = json.loads(json.dumps(params, default=str))
            (self.path.parent / "hparams.yaml").write_text(yaml.safe_dump(plain, sort_keys=False))

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def finalize(self, status: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Sieve:
    """Selects the rows up to `last_step`, and `most` rows of that one (None: all);
    called for each row in order.
    """

    def __init__(self, last_step: int, most: int | None) -> None:
        self._last_step = last_step
        self._most = most
        self._seen = 0

    def __call__(self, step: int) -> bool:
        """Return whether the next row, which belongs to this step, is retained."""
        if step == self._last_step and self._most is not None:
            self._seen += 1
            return self._seen <= self._most
        return step <= self._last_step


Plain = bool | int | float | str


def flatten(settings: Mapping[str, Any]) -> dict[str, Plain]:
    """Return {"optimizer.lr": 0.1, ...}.
    A list becomes its JSON text; null becomes "null"; any other object its text.
    """
    flat: dict[str, Plain] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{name}.{inner}": leaf for inner, leaf in flatten(value).items()}
        elif isinstance(value, (bool, int, float, str)):
            flat[str(name)] = value
        else:
            flat[str(name)] = json.dumps(value, default=str)
    return flat
