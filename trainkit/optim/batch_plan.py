"""The contract of batch size and learning rate: one object, printed at the start of every run and
saved with it.

    global batch = batch_size x world_size x accumulate_grad_batches
    factor       = global batch / lr_reference_batch_size               (linear: Goyal et al. 2017, section 2.1)
                   its square root                                      (sqrt: Krizhevsky 2014, section 5)
                   1                                                    (none)
    lr(step)     = factor x rate of the user's optimizer and schedule x warm-up(step)

Warm-up goes from the user's rate (1 / factor of the scaled one) to the scaled one, linearly, step
by step (Goyal et al. 2017, section 2.2); from 0 if the factor is 1 or less. It depends only on the
global batch, so the same problem is solved on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from trainkit.console import plural
from trainkit.errors import ConfigError

Scaling = Literal["linear", "sqrt", "none"]
# Adaptive methods divide by the gradient's own size: a batch k times larger does not need k times
# the rate.
_ADAPTIVE = frozenset(
    [
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "Adamax",
        "Adagrad",
        "Adadelta",
        "RMSprop",
        "Adafactor",
        "AdEMAMix",
        "SOAP",
        "AdamWScheduleFree",
        "LAMB",
        "Muon",
    ]
)


@dataclass(frozen=True)
class BatchPlan:
    """The numbers of a run.

    Attributes:
        batch_size: samples of one microbatch on one rank; None for a stream of unknown batches.
        world_size: number of ranks.
        accumulate: microbatches of one rank in a step.
        later: (first epoch, microbatches) of each change of the accumulation, ascending.
        lr_scaling: how the rate follows the global batch.
        lr_reference_batch_size: the global batch that the user's rate is meant for; None for one
            rank's batch of a step.
        warmup_steps: steps of warm-up, 0 for none.
        communication: what travels in place of exact gradients, in words.
        rank_shares: of a step's samples, as "3:1", or "even".
    """

    batch_size: int | None
    world_size: int
    accumulate: int
    lr_scaling: Scaling
    lr_reference_batch_size: int | None
    warmup_steps: int
    later: tuple[tuple[int, int], ...] = ()
    communication: str = "exact"
    rank_shares: str = "even"

    def __post_init__(self) -> None:
        if (
            self.batch_size is None
            and self.lr_reference_batch_size is not None
            and self.lr_scaling != "none"
        ):
            raise ConfigError(
                f"trainer.lr_reference_batch_size is {self.lr_reference_batch_size}, but the"
                " batches of the training data are of unknown size, so there is nothing to compare"
                " it with. Use a DataLoader, or leave it out."
            )

    def at(self, epoch: int) -> BatchPlan:
        """Return the contract of an epoch, without later changes."""
        return replace(
            self, accumulate=accumulation_at(((0, self.accumulate), *self.later), epoch), later=()
        )

    @property
    def global_batch_size(self) -> int | None:
        """Samples of a full step on all ranks, if known."""
        return (
            None if self.batch_size is None else self.batch_size * self.world_size * self.accumulate
        )

    @property
    def lr_factor(self) -> float:
        """The factor of every learning rate of the user."""
        ratio: float = self.world_size
        if self.lr_reference_batch_size is not None and self.global_batch_size is not None:
            ratio = self.global_batch_size / self.lr_reference_batch_size
        return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[self.lr_scaling]

    @property
    def largest_factor(self) -> float:
        """The largest factor of all epochs."""
        return max(self.at(epoch).lr_factor for epoch in (0, *(first for first, _ in self.later)))

    def not_for_adaptive(self, optimizers: Collection[str]) -> str | None:
        """Return a sentence if the linear rule, which is SGD's, raises the rate of an adaptive
        optimizer; else None.

        Args:
            optimizers: names of their classes.
        """
        adaptive = sorted(_ADAPTIVE.intersection(optimizers))
        if not adaptive or self.lr_scaling != "linear" or self.largest_factor <= 1:
            return None
        return (
            f"trainer.lr_scaling is linear and multiplies the rate of {', '.join(adaptive)} by"
            f" {self.largest_factor:g}: that rule is SGD's. Use trainer.lr_scaling=sqrt or none."
        )

    @property
    def warmup_start(self) -> float:
        """The share of the scaled rate from which warm-up begins: the user's own rate where SGD's
        linear rule raises it (Goyal et al. 2017, section 2.2); else 0, as adaptive optimizers need.
        """
        rises = self.lr_scaling == "linear" and self.lr_factor > 1.0
        return 1.0 / self.lr_factor if rises else 0.0

    def warmup(self, step: int) -> float:
        """Return the multiplier of the scaled rate for the step after `step` steps."""
        if step >= self.warmup_steps:
            return 1.0
        start = self.warmup_start
        return start + (1.0 - start) * (step + 1) / self.warmup_steps

    def warmup_left(self, total_steps: int | None, lrs: list[float]) -> str | None:
        """Return a sentence if warm-up is longer than a run of
        `total_steps` steps (None: unknown), else None.
        """
        if not total_steps or self.warmup_steps <= total_steps:
            return None
        scaled = [lr * self.lr_factor for lr in dict.fromkeys(lrs)]
        last = ", ".join(f"{lr * self.warmup(total_steps - 1):.4g}" for lr in scaled)
        return (
            f"{self.warmup_steps} steps are longer than the run of {plural(total_steps, 'step')}:"
            f" warm-up ends at {last} and never reaches {', '.join(f'{lr:g}' for lr in scaled)}."
            " Lower trainer.lr_warmup_steps or lr_warmup_epochs, or train longer."
        )

    def describe(
        self, lrs: list[float], total_steps: int | None = None, rank: str = "rank"
    ) -> list[tuple[str, str]]:
        """Return the contract in words, for the banner.

        Args:
            lrs: the user's rates, one for each parameter group.
            rank: the word for what `world_size` counts.
        """
        shown = ", ".join(f"{lr:g}" for lr in dict.fromkeys(lrs))
        scaled = ", ".join(f"{lr * self.lr_factor:g}" for lr in dict.fromkeys(lrs))
        size, total = (
            "?" if n is None else str(n) for n in (self.batch_size, self.global_batch_size)
        )
        ranks = plural(self.world_size, rank)
        batch = f"{size} per {rank} x {ranks} x {self.accumulate} accumulated = {total} samples"
        if self.rank_shares != "even":
            batch += f", shares {self.rank_shares}"
        for epoch, microbatches in self.later:
            batch += (
                f"; from epoch {epoch + 1}: x {microbatches} ="
                f" {self.at(epoch).global_batch_size or '?'}"
            )
        if self.lr_scaling == "none":
            rate = f"{shown} (lr_scaling=none)"
        else:
            ratio = ranks
            if self.lr_reference_batch_size is not None:
                ratio = f"{self.global_batch_size} / {self.lr_reference_batch_size}"
            ratio = f"sqrt({ratio})" if self.lr_scaling == "sqrt" else ratio
            rate = f"{shown} x {ratio} = {scaled} (lr_scaling={self.lr_scaling})"
        if self.warmup_steps:
            start = shown if self.warmup_start else "0"
            rate += f", warm-up from {start} over {self.warmup_steps} steps"
        too_long = self.warmup_left(total_steps, lrs)
        return [
            ("global batch", batch),
            ("learning rate", rate),
            *([("warm-up", too_long)] if too_long else []),
        ]

    def differences(self, other: BatchPlan) -> list[str]:
        """Return the differences to `other` in words."""
        labels = {
            "accumulate": "accumulate_grad_batches",
            "later": "accumulate_grad_batches by epoch",
        }
        pairs = [
            (labels.get(f.name, f.name), getattr(self, f.name), getattr(other, f.name))
            for f in fields(self)
        ]
        pairs = [
            (name, dict(a), dict(b)) if isinstance(a, tuple) else (name, a, b)
            for name, a, b in pairs
        ]
        pairs += [
            (name, getattr(self, name), getattr(other, name))
            for name in ("global_batch_size", "lr_factor")
        ]
        return [f"{name} was {before}, is {now}" for name, before, now in pairs if before != now]

    def to_dict(self) -> dict[str, Any]:
        """Return the values that a checkpoint saves."""
        return asdict(self)


Accumulation = Sequence[tuple[int, int]]


def accumulation_at(changes: Accumulation, epoch: int) -> int:
    """Return the microbatches of one rank in a step of `epoch`, given
    (first epoch, microbatches), ascending.
    """
    return [microbatches for first, microbatches in changes if first <= epoch][-1]


def derive_accumulation(
    batch_size: int | None,
    world_size: int,
    accumulate: int | Mapping[int, int] | None,
    global_batch_size: int | None,
) -> Accumulation:
    """Return the microbatches of one rank in a step, as (first epoch, microbatches), ascending and
    from epoch 0 on.

    Raises:
        ConfigError: both are given and disagree, or the global batch size cannot be met; names the
            nearest that can.
    """
    if isinstance(accumulate, Mapping):
        if global_batch_size is not None:
            raise ConfigError(
                f"trainer.accumulate_grad_batches is {dict(accumulate)}, and"
                f" trainer.global_batch_size={global_batch_size} requests one size in all epochs."
                " Set only one of the two."
            )
        return sorted({0: 1, **accumulate}.items())
    if global_batch_size is None:
        return [(0, accumulate or 1)]
    if batch_size is None:
        raise ConfigError(
            f"trainer.global_batch_size is {global_batch_size}, but the batches of the training"
            " data are of unknown size. Use a DataLoader, or set trainer.accumulate_grad_batches."
        )
    one = batch_size * world_size
    if global_batch_size % one:
        below = global_batch_size // one * one
        nearest = " or ".join(str(n) for n in (below, below + one) if n)
        raise ConfigError(
            f"trainer.global_batch_size is {global_batch_size}, which is no multiple of"
            f" data.batch_size x ranks = {batch_size} x {world_size} = {one}. Nearest: {nearest};"
            " or change data.batch_size."
        )
    derived = global_batch_size // one
    if accumulate is not None and accumulate != derived:
        raise ConfigError(
            f"trainer.accumulate_grad_batches is {accumulate}, but"
            f" trainer.global_batch_size={global_batch_size} needs {derived} at {world_size} ranks"
            f" of {batch_size}. Set only one of the two."
        )
    return [(0, derived)]


def derive_warmup(
    steps: int | None, epochs: float | None, steps_of: Callable[[int], int | None]
) -> int:
    """Return the steps of warm-up; `steps_of` returns the steps of an epoch, or None if unknown.

    Raises:
        ConfigError: both forms are given, or epochs of unknown length.
    """
    if steps is not None and epochs is not None:
        raise ConfigError(
            f"trainer.lr_warmup_steps is {steps} and trainer.lr_warmup_epochs is {epochs}; set only"
            " one of the two."
        )
    if epochs:
        known = [steps_of(epoch) for epoch in range(math.ceil(epochs))]
        if None in known:
            raise ConfigError(
                f"trainer.lr_warmup_epochs is {epochs}, but the training data has no length. Set"
                " trainer.lr_warmup_steps."
            )
        last = epochs - math.floor(epochs) or 1.0  # the part of the last epoch that counts
        return round(sum(known[:-1]) + last * known[-1])  # type: ignore[arg-type, operator]
    return steps or 0
