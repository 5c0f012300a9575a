"""Gradients of one optimizer, for steps that a Task takes by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def read_gradients(parameters: Iterable[Tensor]) -> dict[int, tuple[int, int]]:
    """Return what differs once a gradient is written: the tensor, and its count of writes."""
    return {id(p): (id(p.grad), p.grad._version) for p in parameters if p.grad is not None}


class WaitingGradients:
    """What a checkpoint holds of batches without an update: this rank's part of gradients that an
    update of a later batch counts (accumulation by hand).

    Args:
        optimizers: of the fit.
        ranks: this rank, and their number.

    Attributes:
        began: whether some waited as the present batch began.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        ranks: tuple[int, int],
    ) -> None:
        self._optimizers = optimizers
        self._rank, self._world_size = ranks
        self._stepped = set[int]()  # ids of the optimizers that have, in the last batch
        # of an optimizer: its first gradient, and how often that was written
        self._used: dict[int, tuple[TensorWeakRef, int]] = {}
        self.began = False

    def begin(self) -> None:
        """Note whether gradients of earlier batches wait, before a batch adds its own."""
        self.began = any(map(self._waits, self._optimizers))
        self._stepped.clear()

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an update has counted an optimizer's gradients."""
        self._stepped.add(id(optimizer))
        if (first := _first_gradient(optimizer)) is not None:
            self._used[id(optimizer)] = TensorWeakRef(first), first._version

    def _waits(self, optimizer: torch.optim.Optimizer) -> bool:
        if id(optimizer) in self._stepped:
            return False
        first = _first_gradient(optimizer)
        if first is None or id(optimizer) not in self._used:
            return first is not None
        used, version = self._used[id(optimizer)]
        return used() is not first or version != first._version

    def state_dict(self) -> list[Tensor | None]:
        """Return a gradient, or None, for each parameter; nothing if there are none."""
        late = [p for each in self._optimizers if self._waits(each) for p in parameters_of(each)]
        if not late:
            return []
        waiting = {p: p.grad.detach().cpu() for p in late if p.grad is not None}
        return [waiting.get(parameter) for parameter in self._parameters()]

    def load_state_dicts(self, states: list[list[Tensor | None]]) -> None:
        """Take this rank's; on fewer ranks each takes those of several, whose sum counts."""
        for state in states[self._rank :: self._world_size]:
            for parameter, gradient in zip(self._parameters(), state, strict=False):
                if gradient is not None:
                    own = gradient.to(parameter.device)
                    parameter.grad = own if parameter.grad is None else parameter.grad + own

    def _parameters(self) -> list[Tensor]:
        # each once: two optimizers may have the same
        return [*dict.fromkeys(p for each in self._optimizers for p in parameters_of(each))]


def _first_gradient(optimizer: torch.optim.Optimizer) -> Tensor | None:
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    return next((gradient for gradient in gradients if gradient is not None), None)


def sum_gradients(
    parameters: list[Tensor], all_reduce: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    """Sum gradients over ranks, in place: one collective for each type of number.
    A gradient on no rank stays None.
    """
    own = torch.tensor([float(p.grad is not None) for p in parameters], device=device)
    there = (all_reduce(own) > 0).tolist()
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for parameter, has_any in zip(parameters, there, strict=True):
        if has_any:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            by_type.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_type.values():
        summed = all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        parts = torch.split(summed, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
