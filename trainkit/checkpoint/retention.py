"""Which checkpoints of a run are retained, and which of them is best:
names, scores and outcomes of writing; no files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal


class Retained:
    """The names of the retained checkpoints, with their scores.

    Args:
        mode: whether less ("min") or more ("max") is better.
        top_k: how many of the best are retained; -1 for all.
        keeps_last: whether the newest is retained, however it scores.

    Attributes:
        scores: name -> score, in the order of writing. NaN is the worst.
        unfit: names that are never the best: weights or score are not finite.
        last: the newest's name, or "".
    """

    def __init__(self, mode: Literal["min", "max"], top_k: int, keeps_last: bool) -> None:
        self._mode = mode
        self._top_k = top_k
        self._keeps_last = keeps_last
        self.scores: dict[str, float] = {}
        self.unfit: set[str] = set()
        self.last = ""

    def copy(self) -> Retained:
        """Return an independent copy."""
        other = Retained(self._mode, self._top_k, self._keeps_last)
        other.scores, other.unfit, other.last = dict(self.scores), set(self.unfit), self.last
        return other

    def add(self, name: str, score: float, is_fit: bool = True) -> list[str]:
        """Add the newest; return the names that are no longer retained,
        which may include its own.
        """
        before = list(self.scores)
        self.scores.pop(name, None)
        self.scores[name] = score
        self.unfit = self.unfit - {name} if is_fit else self.unfit | {name}
        if self._top_k != -1:
            ranked = sorted(self.scores, key=lambda known: (known in self.unfit, self._rank(known)))
            wanted = set(ranked[: self._top_k])
            if self._keeps_last:
                wanted.add(name)
            self.scores = {known: s for known, s in self.scores.items() if known in wanted}
        self.last = name if name in self.scores else self.last
        return [known for known in dict.fromkeys([*before, name]) if known not in self.scores]

    @property
    def best(self) -> str:
        """The best one's name; the newest's if none has a score; "" if none is fit."""
        fit = [name for name in self.scores if name not in self.unfit]
        best = min(fit, key=self._rank, default="")
        return self.last if best and self._rank(best) == math.inf and self.last in fit else best

    def _rank(self, name: str) -> float:
        score = self.scores[name]
        if math.isnan(score):
            return math.inf
        return -score if self._mode == "max" else score


@dataclass(frozen=True)
class _Save:
    """A save whose outcome is not known yet, and the names retained before it."""

    name: str
    before: Retained
    outcome: Future[bool]


class Retention:
    """The checkpoints of one ModelCheckpoint: what each save retains and removes, and what follows
    from its outcome.

    Args:
        retained: empty.

    Attributes:
        names: of the retained checkpoints.
        dropped: names that the last save removes.
        temporary: written only to resume from: removed with the next save, or at the end of the
            run.
        failed: rank 0: whether the last save was not written.
    """

    def __init__(self, retained: Retained) -> None:
        self.names = retained
        self.dropped: list[str] = []
        self.temporary: list[str] = []
        self.failed = False
        self._written = ""  # the name of the last save; "" if it failed
        self._save: _Save | None = None
        self._earlier: _Save | None = None  # a save of an earlier attempt of an elastic fit

    def restarted(self) -> Retention:
        """Return the empty retention of another run,
        which may still have to learn the outcome of this one's last save.
        """
        other = Retention(self.names.copy())
        other.names.scores = {}
        other.names.unfit = set()
        other.names.last = ""
        other._earlier = self._save
        return other

    def name_for(self, name: str, score: float, again: bool, is_fit: bool = True) -> str:
        """Return the name of a save: `name`, or NAME-v1, NAME-v2, ... while a checkpoint of another
        step that this save retains has it. The arguments are those of `plan`.
        """
        names = self.names.copy()
        if again:
            names.scores.pop(self._written, None)
        names.add("", score, is_fit)
        numbered = (f"{name}-v{number}" for number in itertools.count(1))
        return next(n for n in itertools.chain([name], numbered) if n not in names.scores)

    def plan(self, name: str, score: float, again: bool, is_fit: bool = True) -> Retained:
        """Decide what a save retains and drops, before it is written, so that the checkpoint
        contains it.

        Args:
            again: whether it replaces the last save, of the same step.
            is_fit: whether it may be the best.

        Returns:
            The names retained before, for `begin`.
        """
        before = self.names.copy()
        last = self._written
        if again and last:
            self.names.scores.pop(last, None)
        dropped = self.names.add(name, score, is_fit)
        if again:
            dropped.append(last)
        dropped += self.temporary
        self.dropped = [known for known in dict.fromkeys(dropped) if known and known != name]
        return before

    def leave_out(self) -> None:
        """Do not write the save that was planned: another of its step replaces none."""
        self._written = ""

    def begin(self, name: str, before: Retained, outcome: Future[bool]) -> None:
        """Take the future of a save that was planned."""
        self._save = _Save(name, before, outcome)

    def settle(self) -> None:
        """Take the outcome of the last save into account; waits for it."""
        # of an attempt before ranks changed: what was restored counts
        if self._earlier is not None:
            name = self._earlier.name
            written = self._earlier.outcome.result()
            self._earlier = None
            if not written:
                self.names.scores.pop(name, None)
            elif name not in self.names.scores and name not in self.temporary:
                self.temporary.append(name)
        if self._save is not None:
            written = self._save.outcome.result()
            self.failed = not written
            self._written = self._save.name if written else ""
            if not written:
                self.names = self._save.before
                self.temporary = [n for n in self.dropped if n not in self.names.scores]
            self._save = None

    def settle_if_done(self) -> None:
        """The same, unless a checkpoint is still being written."""
        if all(save is None or save.outcome.done() for save in (self._earlier, self._save)):
            self.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return names and scores."""
        self.settle_if_done()
        names = self.names
        known = {
            "kept": dict(names.scores),
            "unfit": sorted(names.unfit),
            "best": names.best,
            "last": names.last,
        }
        return known | {"dropping": list(self.dropped), "unkept": list(self.temporary)}

    def load_state_dict(self, state: dict[str, Any], there: Collection[str]) -> None:
        """Take back those that are still `there`, in the store."""
        there = {*there, self._earlier.name if self._earlier else ""}
        self.names.scores = {name: score for name, score in state["kept"].items() if name in there}
        self.names.unfit = set(state.get("unfit", ())) & self.names.scores.keys()
        self.names.last = state["last"] if state["last"] in there else ""
        self.dropped = [
            name for name in state["dropping"] if name in there and name not in self.names.scores
        ]
        self.temporary = list(state["unkept"])
        # the checkpoint of this state: what saves its step again replaces that, and none before it
        self._written = self.temporary[-1] if self.temporary else self.names.last
