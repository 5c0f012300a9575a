"""The arithmetic of an epoch: which samples each rank gets in each microbatch of each step. Pure,
no torch.

An epoch is one order of the samples. Step `s` takes the next `global_batch_size` of them, on any
number of ranks; ranks and microbatches only split that batch:

    order      | step 0                          | step 1                          | last step, short |
    step       | micro 0: rank 0 | rank 1 | micro 1: rank 0 | rank 1 |

so cell `micro * world_size + rank` takes the cell'th chunk. A short last step is spread evenly: it
uses as many microbatches as it needs, of sizes that differ by one at most, and a rank may have no
sample in it. Every rank can compute every other rank's share, so the weight of a microbatch needs
no communication.

If ranks have joined or left since the run's beginning, a step keeps its samples: they are spread
evenly over the present ranks, in as many microbatches as needed.

An engine that gathers weights in each forward needs as many forwards on all ranks: `even` gives a
rank without samples an empty range: it borrows a sample, which weighs nothing.

Ranks of unequal speed take unequal parts of each round of microbatches, if `shares` names them: of
64 samples of a round, ranks with shares 3 and 1 take 48 and 16. Steps keep their samples and their
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class StepPlan:
    """How the samples of an epoch are split into steps, microbatches and ranks.

    Attributes:
        num_samples: samples in an epoch, 0 or more.
        batch_size: samples of one microbatch on one rank.
        world_size: number of ranks.
        accumulate: microbatches of one rank in a step, at the declared number of ranks.
        drop_last: leave out a last step that is short.
        pad: fill a last step that is short with the epoch's first samples, again: places beyond the
            last one.
        declared_ranks: the number of ranks that `accumulate` is meant for, if it differs from
            `world_size`.
        even: give all ranks as many microbatches in each step.
        shares: of a round's samples, one number of 1 or more for each rank; None for even ones.
    """

    num_samples: int
    batch_size: int
    world_size: int = 1
    accumulate: int = 1
    drop_last: bool = False
    pad: bool = False
    declared_ranks: int | None = None
    even: bool = False
    shares: tuple[int, ...] | None = None

    @cached_property
    def global_batch_size(self) -> int:
        """Samples of a full step on all ranks."""
        return self.batch_size * (self.declared_ranks or self.world_size) * self.accumulate

    @property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def samples_in(self, step: int) -> int:
        """Return the number of samples of step `step` (from 0) on all ranks."""
        if self.pad:
            return self.global_batch_size
        return min(self.global_batch_size, self.num_samples - step * self.global_batch_size)

    def microbatches(self, step: int, rank: int) -> list[range]:
        """Return the places in the epoch's order that `rank` takes in `step`, a range for each
        microbatch.

        With `pad` a place may lie beyond the last sample; it is that of `place % num_samples`.

        Ranges are never empty, but for borrowed batches: a rank without samples in a short last step gets an
        empty list.
        """
        samples = self.samples_in(step)
        start = step * self.global_batch_size
        rounds = -(-samples // (self.batch_size * self.world_size))
        if self.shares is not None:
            return self._in_shares(self.shares, range(start, start + samples), rounds, rank)
        cells = rounds * self.world_size
        size, longer = divmod(samples, cells)
        result = []
        for cell in range(rank, cells, self.world_size):
            first = start + cell * size + min(cell, longer)
            last = first + size + (1 if cell < longer else 0)
            if last > first or self.even:
                result.append(range(first, last))
        return result

    def _in_shares(
        self, shares: tuple[int, ...], places: range, rounds: int, rank: int
    ) -> list[range]:
        before = sum(shares[:rank])
        own = shares[rank]
        total = sum(shares)
        result = []
        for i in range(rounds):
            one = places[len(places) * i // rounds : len(places) * (i + 1) // rounds]
            part = one[len(one) * before // total : len(one) * (before + own) // total]
            if part or self.even:
                result.append(part)
        return result

    def reads(self, step: int, places: range) -> range:
        """Return the places of the samples in a microbatch of `step`: its own;
        the step's first one for an empty range.
        """
        start = step * self.global_batch_size
        return places or range(start, start + 1)
