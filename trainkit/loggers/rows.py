"""RowLogger: a file of the run's folder that holds a row for each time numbers were logged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from trainkit.loggers.base import Logger

if TYPE_CHECKING:
    from trainkit.api.task import Task
    from trainkit.trainer import Trainer


class RowLogger(Logger):
    """Knows which rows of the file are of the run that goes on, and which of what is trained anew.

    Attributes:
        sieve: in `open`: lets the rows through that are kept.
    """

    settles = True
    _file: TextIO | None = None

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._last_step, self._rows_of_step, self._knows = -1, 0, False

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        """Forget an earlier run."""
        if stage == "fit":
            self._forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the last step that has rows, and how many it has: some that follow may be of the same step."""
        return {"step": self._last_step, "rows_of_step": self._rows_of_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember it until the file is opened. What an older trainkit has kept is passed over."""
        if "step" in state_dict:
            self._last_step, self._rows_of_step, self._knows = state_dict["step"], state_dict["rows_of_step"], True

    def taken(self, step: int) -> None:
        """Count."""
        if step > self._last_step:
            self._last_step, self._rows_of_step = step, 0
        self._rows_of_step += step == self._last_step

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        """Note what is kept, before a row is taken; the file is opened in the thread."""
        known = Sieve(self._last_step, self._rows_of_step)
        self.sieve = known if self._knows else Sieve(trainer.global_step, None)
        super().on_fit_start(trainer, task)

    def flush(self) -> None:
        """Put the rows on disk."""
        if self._file is not None:
            self._file.flush()

    def finalize(self, status: str) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Sieve:
    """Lets the rows through that a checkpoint knows of, asked in their order.

    Args:
        last_step: the last step that it knows of.
        most: how many rows that one has; None for all.
    """

    def __init__(self, last_step: int, most: int | None) -> None:
        self._last_step, self._most, self._seen = last_step, most, 0

    def __call__(self, step: int) -> bool:
        """Whether the next row, which is of this step, is kept."""
        if step == self._last_step and self._most is not None:
            self._seen += 1
            return self._seen <= self._most
        return step <= self._last_step


Plain = bool | int | float | str


def flatten(settings: Mapping[str, Any]) -> dict[str, Plain]:
    """Return {"optimizer.lr": 0.1, ...}. A list is its JSON text; null is "null"; any other object is its text."""
    flat: dict[str, Plain] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{name}.{inner}": found for inner, found in flatten(value).items()}
        elif isinstance(value, (bool, int, float, str)):
            flat[str(name)] = value
        else:
            flat[str(name)] = json.dumps(value, default=str)
    return flat
