"""How a gradient travels: laid out alike on all ranks, scaled and narrowed before the sum, and
restored after it.

    gradient -> dense, in its parameter's strides -> x prescale -> narrowed -> sum over ranks ->
    widened -> x postscale

The losses are weighted by each rank's share of the step's samples, so that the sum alone is the
mean gradient of `op="average"`. With f = gradient_predivide_factor:

    average   prescale 1/f   postscale f
    sum       prescale 1/f   postscale f x world_size   (the sum of the ranks' own mean gradients, in steps of equal shares)
    adasum    prescale 1     postscale world_size       (Adasum(c a, c b) = c Adasum(a, b): that of the own mean gradients)

Scaling happens in the gradient's own dtype, before it is narrowed: f < 1 lifts small gradients out
of float16's underflow, f > 1 keeps large ones out of its overflow. Horovod's predivide factor
divides after the narrowing, and its default (f = 1) leaves the division by the number of ranks for
after the sum; here that is f = 1 / world_size.

What narrowing costs: float16 keeps 11 significant bits (each rounding moves an element by up to 1
part in 2048); elements above 65504 become infinite, below 6.1e-5 they lose bits, below 3.0e-8 they
become 0. bfloat16 keeps 8 bits (1 part in 256) and the range of float32. Each rank's gradient is
rounded once, and each addition on the way rounds its result again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_NARROW = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Wire:
    """What is done to gradients on both sides of the sum."""

    # the dtype that wider floating-point gradients travel in, or None
    narrow: torch.dtype | None = None
    prescale: float = 1.0  # what they are multiplied by before the sum, in their own dtype
    postscale: float = 1.0  # the same after it
    # the dtypes that the framework can sum; None for all. Others travel as float32.
    carries: frozenset[torch.dtype] | None = None

    def dtype_of(self, dtype: torch.dtype, summed: bool = True) -> torch.dtype:
        """Return the dtype that a gradient of `dtype` travels in;
        what is not summed on the way needs no sum of its dtype.
        """
        carried = not summed or self.carries is None or dtype in self.carries
        if (
            self.narrow is not None
            and dtype.is_floating_point
            and (dtype.itemsize > self.narrow.itemsize or not carried)
        ):
            return self.narrow
        return dtype if carried else torch.float32

    def pack(self, tensor: Tensor, summed: bool = True) -> Tensor:
        """Return what travels: `tensor` itself (scaled in place) if it need not be narrowed."""
        if self.prescale != 1.0:
            tensor.mul_(self.prescale)
        if tensor.is_complex() and self.carries is not None and tensor.dtype not in self.carries:
            tensor = torch.view_as_real(tensor)  # the sum of pairs is the pairs' sum
        return tensor.to(self.dtype_of(tensor.dtype, summed))

    def unpack(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum in a gradient's dtype:
        `total` itself (scaled in place) if it has that dtype.
        """
        restored = (
            total.to(dtype) if total.is_complex() or not dtype.is_complex else _paired(total, dtype)
        )
        if self.postscale != 1.0:
            restored.mul_(self.postscale)
        return restored


def _paired(total: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_complex(total.to(dtype.to_real()))


def make_wire(
    compression: str,
    op: str,
    predivide: float,
    world_size: int,
    carries: frozenset[torch.dtype] | None = None,
) -> Wire:
    """Return the wire of an engine's options (HorovodEngine says what they mean);
    the factors stand at the top.
    """
    after = predivide if op == "average" else predivide * world_size
    return Wire(_NARROW[compression], 1.0 / predivide, after, carries)


def laid_out(parameter: nn.Parameter) -> Tensor:
    """Return the parameter's gradient, dense and with the parameter's strides:
    ranks send their elements in one order.
    """
    grad = parameter.grad
    assert grad is not None
    if grad.is_sparse:
        grad = grad.to_dense()
    return grad if grad.stride() == parameter.stride() else torch.empty_like(parameter).copy_(grad)


def rows_of(parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
    """Return a sparse gradient as (numbers of rows, their values), rows that occur twice included.

    Nothing is merged, since that would wait for the device; if a gradient came out dense (a tied
    weight), all of its rows are sent.
    """
    grad = parameter.grad
    assert grad is not None
    if grad.is_sparse and grad.sparse_dim() == 1:
        return grad._indices()[0], grad._values()
    dense = grad.to_dense() if grad.is_sparse else grad
    return torch.arange(len(dense), device=dense.device), dense


def from_rows(rows: Tensor, values: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a sparse gradient of the parameter's shape;
    rows that occur several times count as their sum.
    """
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, parameter.shape, check_invariants=False
    )


def no_rows(parameter: nn.Parameter) -> Tensor:
    """Return an empty sparse gradient: the part of a rank that has none."""
    rows = torch.zeros(0, dtype=torch.int64, device=parameter.device)
    return from_rows(rows, parameter.detach().new_zeros((0, *parameter.shape[1:])), parameter)
