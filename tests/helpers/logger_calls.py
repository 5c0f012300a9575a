"""The values that a run passes to its loggers."""

from __future__ import annotations

from typing import Any

from trainkit.api.callback import Callback


class Written(Callback):
    """Records (step, values) of the logged names that begin with
    one of `starts` (by default all).
    """

    def __init__(self, *starts: str) -> None:
        self.starts = starts
        self.rows: list[tuple[int, dict[str, float]]] = []

    def on_metrics(self, trainer: Any, task: Any, metrics: dict[str, float], step: int) -> None:
        """Keep them."""
        chosen = {
            name: value
            for name, value in metrics.items()
            if not self.starts or name.startswith(self.starts)
        }
        if chosen:
            self.rows.append((step, chosen))

    def of(self, name: str) -> list[float]:
        """Return the values of one name, in order."""
        return [values[name] for _, values in self.rows if name in values]
