"""The latest logged values, and the history of a run's epochs."""

from __future__ import annotations

from collections.abc import Mapping


class LatestMetrics(dict[str, float]):
    """The latest logged values by name, as `trainer.callback_metrics`.

    Attributes:
        logged_at: the step of each value.
        history: the values of each epoch, with its number, last step and rate.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logged_at: dict[str, int] = {}
        self.history: list[dict[str, float]] = []

    def put(self, values: Mapping[str, float], step: int) -> None:
        """Store the values of a step."""
        self.update(values)
        self.logged_at |= dict.fromkeys(values, step)

    def record(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Add an epoch to the history, in place of what was known of it before a run resumed."""
        self.history = [row for row in self.history if row["epoch"] < epoch]
        self.history.append({"epoch": epoch, "step": step, **values})
