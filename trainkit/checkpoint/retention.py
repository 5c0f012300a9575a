"""Which checkpoints a run retains, and which of them is best: names and scores, no files."""

from __future__ import annotations

import math
from typing import Any, Literal


class Kept:
    """The retained checkpoints of one ModelCheckpoint.

    Args:
        mode: whether less ("min") or more ("max") is better.
        top_k: number of best checkpoints to retain; -1 for all.
        keeps_last: whether to retain the newest regardless of its score.

    Attributes:
        scores: name -> score, in the order of writing. NaN (no score) is the worst.
        last: the newest's name, or "".
    """

    def __init__(self, mode: Literal["min", "max"], top_k: int, keeps_last: bool) -> None:
        self._mode, self._top_k, self._keeps_last = mode, top_k, keeps_last
        self.scores: dict[str, float] = {}
        self.last = ""

    def copy(self) -> Kept:
        """Return an independent copy."""
        other = Kept(self._mode, self._top_k, self._keeps_last)
        other.scores, other.last = dict(self.scores), self.last
        return other

    def add(self, name: str, score: float) -> list[str]:
        """Add the newest; return the names of those that are no longer retained, which may include it."""
        before = list(self.scores)
        self.scores.pop(name, None)
        self.scores[name] = score
        if self._top_k != -1:
            best = sorted(self.scores, key=self._rank)[: self._top_k]
            wanted = {*best, name} if self._keeps_last else set(best)
            self.scores = {known: s for known, s in self.scores.items() if known in wanted}
        self.last = name if name in self.scores else self.last
        return [known for known in dict.fromkeys([*before, name]) if known not in self.scores]

    @property
    def best(self) -> str:
        """The best one's name; the newest's if none has a score; "" if there is none."""
        best = min(self.scores, key=self._rank, default="")
        return self.last if best and self._rank(best) == math.inf and self.last in self.scores else best

    def state_dict(self) -> dict[str, Any]:
        """Return names and scores."""
        return {"kept": dict(self.scores), "best": self.best, "last": self.last}

    def load_state_dict(self, state: dict[str, Any], there: set[str]) -> None:
        """Restore those that still exist."""
        self.scores = {name: score for name, score in state["kept"].items() if name in there}
        self.last = state["last"] if state["last"] in there else ""

    def _rank(self, name: str) -> float:
        score = self.scores[name]
        if math.isnan(score):
            return math.inf
        return -score if self._mode == "max" else score
