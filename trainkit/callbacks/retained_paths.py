"""What a ModelCheckpoint retains, by Lightning's names."""

from __future__ import annotations

from typing import Literal

from trainkit.checkpoint.retention import Retained, Retention
from trainkit.checkpoint.store import Store
from trainkit.metrics.latest import Number


class RetainedPaths:
    """Part of ModelCheckpoint; see there."""

    monitor: str | None
    mode: Literal["min", "max"]
    store: Store
    _retention: Retention

    @property
    def state_key(self) -> str:
        """What it compares: scores of another value are not this one's."""
        compared = {"monitor": self.monitor} | ({"mode": self.mode} if self.monitor else {})
        return f"{type(self).__qualname__}{compared}"

    @property
    def best_model_path(self) -> str:
        """See the class."""
        best = self._names.best
        return self.store.path_of(best) if best else ""

    @property
    def best_model_score(self) -> Number | None:
        """See the class."""
        names = self._names
        if self.monitor is None or not names.best:
            return None
        return Number(names.scores[names.best])

    @property
    def best_k_models(self) -> dict[str, Number]:
        """See the class."""
        scores = {} if self.monitor is None else self._names.scores
        return {self.store.path_of(name): Number(score) for name, score in scores.items()}

    @property
    def last_model_path(self) -> str:
        """See the class."""
        last = self._names.last
        return self.store.path_of(last) if last else ""

    @property
    def _names(self) -> Retained:
        self._retention.settle_if_done()
        return self._retention.names
