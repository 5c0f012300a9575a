"""PowerSGD: sums of gradient matrices by two narrow factors, with error feedback (Vogels et al.
2019, algorithms 1 and 2).

For each matrix M of a bucket, of n rows and m columns (the longer side; a tall one is transposed),
and r columns of a factor:

    M = gradient + held back         on each rank
    P = sum over ranks of M Q        first message of the bucket, [n, r]; gradients that travel exactly go with it
    P = orthonormal columns of P     the same on all ranks
    Q = sum over ranks of M^T P      second message, [m, r]; starts the next step's iteration
    gradient = P Q^T                 the sum over ranks of P P^T M
    held back = M - P (own M^T P)    on each rank; over ranks these add up to what the sum lacks

torch's hook of this name returns the mean; here losses are weighted by shares, so the sum is the
gradient (wire.py). At r = n the columns of P are a basis of the whole space, so that the sum is
exact up to rounding; hence the transposing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainkit.engine.reduce.buckets import NamedParameter
from trainkit.engine.reduce.low_rank import LowRank, TwoMessages
from trainkit.engine.reduce.wire import laid_out
from trainkit.errors import ConfigError
from trainkit.extensions.communication.settings import PowerSGD


@dataclass(eq=False)
class Factors(TwoMessages):
    """A bucket's sum under way.

    Attributes:
        exact: the sums that need no second message: gradients that travel exactly, then flags.
        matrices: M of each.
        bases: P of each matrix, orthonormal.
        own: this rank's part of each Q.
    """

    exact: Tensor | None = None
    matrices: dict[str, Tensor] = field(default_factory=dict)
    bases: dict[str, Tensor] = field(default_factory=dict)
    own: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """That this rank has handed over, in both messages."""
        rest = (
            0
            if self.exact is None
            else self.exact.numel() + sum(p.numel() for p in self.bases.values())
        )
        return (self.message.numel() + rest) * self.message.element_size()


class PowerSGDSums(LowRank):
    """Factors and errors of a run's gradients.

    Args:
        settings: of communication=powersgd.
        scale: of the result, 1 for the sum.

    Attributes:
        steps: of the run; the first ones are exact.
        notes: what was translated from a checkpoint, in words.
    """

    kind = "powersgd"

    def __init__(self, settings: PowerSGD, scale: float = 1.0) -> None:
        self._settings = settings
        self._scale = scale
        self.steps = 0
        self.owing: Factors | None = None
        self._q: dict[str, Tensor] = {}
        self._error: dict[str, Tensor] = {}
        self._latest: dict[str, tuple[Tensor, Tensor]] = {}
        self.notes: list[str] = []

    @property
    def is_on(self) -> bool:
        """Whether this step's matrices travel as factors."""
        return self.steps >= self._settings.start_after_steps

    def serves(self, entries: Sequence[NamedParameter]) -> bool:
        """See LowRank."""
        return self.is_on and any(self._rank_of(p) for _, p in entries)

    def _rank_of(self, parameter: Tensor) -> int:
        return (
            self._settings.rank_for(tuple(parameter.shape)) if parameter.is_floating_point() else 0
        )

    # -- a bucket's two messages ------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, entries: Sequence[NamedParameter], flags: Tensor | None) -> Factors:
        """Return a bucket's first message: each P, then the exact gradients, then flags.
        `.grad` is there for all of it.
        """
        dtype = torch.promote_types(entries[0][1].dtype, torch.float32)
        matrices: dict[str, Tensor] = {}
        narrow = []
        exact = []
        for name, parameter in entries:
            parameter.grad = laid_out(parameter)
            rank = self._rank_of(parameter)
            if not rank:
                exact.append(parameter.grad.reshape(-1).to(dtype))
                continue
            matrix = _wide(parameter.grad).to(dtype)
            matrices[name] = matrix = (
                matrix + self._error[name] if name in self._error else matrix.clone()
            )
            if name not in self._q:
                draw = torch.Generator().manual_seed(len(self._q))
                self._q[name] = torch.randn(matrix.shape[1], rank, generator=draw).to(matrix)
            narrow.append(matrix @ self._q[name])
        if flags is not None:
            exact.append(flags.to(dtype))
        return Factors(
            entries, torch.cat([part.reshape(-1) for part in (*narrow, *exact)]), matrices=matrices
        )

    def send_second(
        self, start: Callable[[Tensor, str], Any], end: Callable[[Any], Tensor]
    ) -> None:
        """See LowRank."""
        if self.owing is not None:
            factors = self.owing
            self.owing = None
            message = self.project(factors, end(factors.handle))
            factors.handle = start(message, f"trainkit.grad.{factors.entries[0][0]}.q")

    @torch.no_grad()
    def project(self, factors: Factors, total: Tensor) -> Tensor:
        """Return a bucket's second message, each Q, given the sum of the first."""
        start = 0
        for name, matrix in factors.matrices.items():
            size = len(matrix) * self._q[name].shape[1]
            # Householder's columns are orthonormal also for dependent or zero ones, so no direction
            # is lost forever.
            basis = torch.linalg.qr(total[start : start + size].view(len(matrix), -1))[0]
            factors.bases[name] = basis
            factors.own[name] = matrix.T @ basis
            start += size
        factors.exact = total[start:]
        factors.message = torch.cat([q.reshape(-1) for q in factors.own.values()])
        return factors.message

    @torch.no_grad()
    def finish(self, factors: TwoMessages, total: Tensor) -> Tensor:
        """See LowRank."""
        assert isinstance(factors, Factors)
        assert factors.exact is not None
        at_q = at_exact = 0
        for name, parameter in factors.entries:
            if name not in factors.matrices:
                self._write(parameter, factors.exact[at_exact : at_exact + parameter.numel()])
                at_exact += parameter.numel()
                continue
            basis, own = factors.bases[name], factors.own[name]
            q = total[at_q : at_q + own.numel()].view_as(own)
            at_q += own.numel()
            gradient = basis @ q.T
            self._write(parameter, gradient if _is_wide(parameter) else gradient.T)
            self._error[name] = factors.matrices[name].sub_(basis @ own.T)
            # By its size: a factor's scale is that of the gradient, and it would square from step
            # to step.
            self._q[name] = q / q.norm().clamp(min=torch.finfo(q.dtype).tiny)
            self._latest[name] = basis, own
        return factors.exact[at_exact:]

    def _write(self, parameter: Tensor, value: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(value.reshape(parameter.shape))
        if self._scale != 1.0:
            parameter.grad.mul_(self._scale)

    def end_step(self, unused: Sequence[str]) -> None:
        """Count a step; hold back again what was held back of parameters that no rank used:
        their gradient is dropped.
        """
        self.steps += 1
        for name in unused:
            if name in self._latest:
                basis, own = self._latest[name]
                self._error[name].add_(basis @ own.T)
        self._latest.clear()

    # -- state ------------------------------------------------------------------------------------------------------

    def shared_tensors(self) -> dict[str, Tensor]:
        """Return what is equal on all ranks."""
        return {f"PowerSGD's Q of {name}": q for name, q in self._q.items()}

    def shared_state(self) -> dict[str, Any]:
        """Return what is equal on all ranks: the count of steps, and each Q."""
        return {"kind": self.kind, "steps": self.steps, "q": dict(self._q)}

    def own_state(self) -> dict[str, Any]:
        """Return what this rank holds back."""
        return {"kind": self.kind, "error": dict(self._error)}

    def load_shared(self, state: dict[str, Any]) -> None:
        """Take back `shared_state`."""
        self.steps, self._q = int(state["steps"]), dict(state["q"])

    def load_own(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> None:
        """Take back this rank's share of what all ranks that saved held back:
        at another number of ranks, an equal part.
        """
        if len(states) == world_size:
            self._error = dict(states[rank]["error"])
            return
        for state in states:
            for name, held in state["error"].items():
                part = held / world_size
                self._error[name] = self._error[name] + part if name in self._error else part
        if any(state["error"] for state in states):
            self.notes.append(
                f"What {len(states)} ranks held back (PowerSGD) is split evenly over {world_size}:"
                " the sum is the same."
            )

    def start(self, trained: Sequence[NamedParameter], sparse: AbstractSet[Tensor]) -> None:
        """Take the parameters; drop restored state of those that are no longer there, or have
        another shape.

        Raises:
            ConfigError: no parameter shrinks, or one has sparse gradients.
        """
        if rows := [name for name, p in trained if p in sparse]:
            raise ConfigError(
                f"communication is 'powersgd', and '{rows[0]}' has sparse gradients, which travel"
                " as rows, not as a matrix. Set engine.sparse_as_dense=true, or use"
                " communication=exact."
            )
        if trained and not any(self._rank_of(p) for _, p in trained):
            raise ConfigError(
                f"communication.rank is {self._settings.rank}, and none of the Task's"
                f" {len(trained)} trained parameters is a matrix that two factors of that rank"
                f" shrink {self._settings.min_compression:g} times: all would travel exactly. Use a"
                " lower rank or communication.min_compression, or communication=exact."
            )
        places = {name: p for name, p in trained if self._rank_of(p)}

        def fitting(
            held: dict[str, Tensor], shape_of: Callable[[Tensor], tuple[int, ...]]
        ) -> dict[str, Tensor]:
            restored = {
                name: held[name]
                for name, p in places.items()
                if name in held and held[name].shape == shape_of(p)
            }
            return {
                name: t.to(
                    places[name].device, torch.promote_types(places[name].dtype, torch.float32)
                )
                for name, t in restored.items()
            }

        self._error = fitting(self._error, lambda p: tuple(_wide(p).shape))
        # of another rank: drawn again
        self._q = fitting(self._q, lambda p: (_wide(p).shape[1], self._rank_of(p)))


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor as a matrix that is not taller than wide."""
    flat = tensor.detach().reshape(len(tensor), -1)
    return flat if _is_wide(tensor) else flat.T


def _is_wide(tensor: Tensor) -> bool:
    return len(tensor) ** 2 <= tensor.numel()
