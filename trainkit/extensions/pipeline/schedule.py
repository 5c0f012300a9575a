"""The order in which a rank runs the forwards and backwards of a step.

    gpipe              all forwards, then all backwards (Huang et al. 2019)
    1f1b               a backward follows a forward as soon as its gradients can be there
                       (Narayanan et al. 2019, PipeDream)
    interleaved_1f1b   the same, of ranks that hold several stages each (Narayanan et al. 2021,
                       Megatron-LM)

A stage is a run of layers. With P ranks and C chunks on each there are P x C of them, and stage s
is chunk s // P of rank s % P: its activations go to the next rank, those of the last rank to the
first one.

Interleaved, a rank takes microbatches in groups of P: all of a group by its first chunk, then all
by its second one, and so on; in backward its last chunk is first. Before its first backward a rank
is ahead by (C - 1) x P forwards, so that a microbatch can be at the last chunk, and by two for each
rank after it. With M microbatches, ranks of equal work wait for (P - 1) / (C x M + P - 1) of a
step. A last group of fewer microbatches runs as a whole one, some of whose passes are left out.

Why no rank waits forever: all ranks have one order of forwards and one of backwards, so what one
rank sends to another arrives in the order in which it is received (links.py), and a rank only
chooses where backwards come between forwards. For whole groups all passes of all ranks can be put
in one order in which each comes after those that it needs, and a rank's own are in its order
(`times` does it; the tests do for up to 8 ranks and 5 chunks). What is left out of it leaves an
order of the others. Of this order the first pass that is not done can run.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

INTERLEAVED = "interleaved_1f1b"
_BACKWARD = 2  # the work of a backward, in forwards
WORK_OF_STEP = 1 + _BACKWARD
Given = TypeVar("Given")


@dataclass(frozen=True)
class Action(Generic[Given]):
    """A forward or a backward of a microbatch by a chunk of a rank."""

    forward: bool
    chunk: int
    microbatch: Given


@dataclass(frozen=True)
class StageSchedule:
    """A schedule of the ranks of one model.

    Attributes:
        name: engine.pipeline_schedule.
        ranks: of a model.
        chunks: stages of each.
    """

    name: str
    ranks: int
    chunks: int = 1

    @property
    def stages(self) -> int:
        """Those of all ranks."""
        return self.ranks * self.chunks

    def ahead(self, rank: int) -> float:
        """Return the forwards whose backward has not run, beside the one that runs: at most."""
        if self.name == "gpipe":
            return math.inf
        after = self.ranks - 1 - rank
        if self.chunks == 1:
            return after
        return 2 * after + (self.chunks - 1) * self.ranks

    def gradients_under_way(self, rank: int) -> int:
        """Return of how many passes a rank's gradients may be on their way to the rank before."""
        if self.chunks == 1:
            return 2
        return int(self.ahead((rank - 1) % self.ranks)) + 1

    def most_of(self, rank: int, microbatches: int, held: Sequence[int]) -> list[int]:
        """Return for each chunk of a rank the most that is held for other passes while one of it
        runs, if a pass of a chunk holds `held`.
        """
        now = 0
        most = [0] * self.chunks
        for action in self.order(rank, range(microbatches)):
            own = held[action.chunk]
            others = now if action.forward else now - own
            most[action.chunk] = max(most[action.chunk], others)
            now = others + own * action.forward
        return most

    def order(self, rank: int, microbatches: Iterable[Given]) -> Iterator[Action[Given]]:
        """Yield what a rank does, pulling a group of microbatches at a time."""
        groups: deque[Sequence[Given | None]] = deque()
        most = self.ahead(rank)
        behind = self._backwards(groups)
        ahead = 0
        for each in self._forwards(iter(microbatches), groups):
            yield from _given(each)
            ahead += 1
            if ahead > most:
                yield from _given(next(behind))
                ahead -= 1
        for each in behind:
            yield from _given(each)

    def _forwards(
        self,
        microbatches: Iterator[Given],
        groups: deque[Sequence[Given | None]],
    ) -> Iterator[Action[Given | None]]:
        size = 1 if self.chunks == 1 else self.ranks
        while own := [*itertools.islice(microbatches, size)]:
            missing = [None] * (size - len(own))
            groups.append([*own, *missing])
            for chunk in range(self.chunks):
                for each in groups[-1]:
                    yield Action(
                        True,
                        chunk,
                        each,
                    )

    def _backwards(self, groups: deque[Sequence[Given | None]]) -> Iterator[Action[Given | None]]:
        while groups:
            group = groups.popleft()
            for chunk in reversed(range(self.chunks)):
                for each in group:
                    yield Action(
                        False,
                        chunk,
                        each,
                    )


def _given(action: Action[Given | None]) -> Iterator[Action[Given]]:
    """Yield an action, if there is a microbatch."""
    if action.microbatch is not None:
        yield Action(
            action.forward,
            action.chunk,
            action.microbatch,
        )


def schedule_of(name: str, ranks: int, chunks: int | None = None) -> StageSchedule:
    """Return the schedule of engine.pipeline_schedule, .pipeline and .pipeline_chunks."""
    default = 2 if name == INTERLEAVED else 1
    return StageSchedule(
        name,
        ranks,
        chunks or default,
    )


def times(schedule: StageSchedule, microbatches: int, work: Sequence[int]) -> list[float]:
    """Return when each rank is done, and how long a step lasts: in forwards of a stage with work 1.

    Args:
        work: of each stage.

    Raises:
        AssertionError: no rank can run its next pass.
    """
    done: dict[tuple[bool, int, int], float] = {}
    clocks = [0.0] * schedule.ranks
    count = range(microbatches)
    ranks = range(schedule.ranks)
    left = [deque(schedule.order(rank, count)) for rank in ranks]
    while any(left):
        before = len(done)
        for rank, actions in enumerate(left):
            while actions:
                action = actions[0]
                stage = action.chunk * schedule.ranks + rank
                needs = _needs(schedule, action, stage)
                if any(each not in done for each in needs):
                    break
                begins = clocks[rank]
                for each in needs:
                    begins = max(begins, done[each])
                own = work[stage]
                if not action.forward:
                    own *= _BACKWARD
                clocks[rank] = begins + own
                key = action.forward, stage, action.microbatch
                done[key] = clocks[rank]
                actions.popleft()
        assert len(done) > before, "ranks wait for one another"
    return clocks


def _needs(schedule: StageSchedule, action: Action[int], stage: int) -> list[tuple[bool, int, int]]:
    """Return the passes whose results an action takes, as (is a forward, stage, microbatch)."""
    own = action.microbatch
    if action.forward:
        return [(True, stage - 1, own)] if stage else []
    needs = [(True, stage, own)]
    if stage < schedule.stages - 1:
        needs.append((False, stage + 1, own))
    return needs
