"""Fingerprints of the tensors of a microbatch, in the order in which they were computed."""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainkit.callbacks.divergence_guard import hash_of
from trainkit.extensions.capsule.batches import tensors_in


class Value(NamedTuple):
    """A tensor of a microbatch: its name, a hash of its bits, and the mean of absolute values (0 if
    all bits are to agree: it is not looked at then).
    """

    name: str
    bits: tuple[int, int]
    size: float


class Fingerprints:
    """Collects fingerprints. They stay on the device until `read`.

    Args:
        with_sizes: whether sizes are compared, not bits alone; they take most of the time.
    """

    def __init__(self, with_sizes: bool) -> None:
        self._with_sizes = with_sizes
        self._names: list[str] = []
        self._prints: list[Tensor] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. Does not wait for the device."""
        tensor = tensor.detach()
        size = _size(tensor) if self._with_sizes else torch.zeros(1, device=tensor.device).double()
        self._names.append(name)
        self._prints.append(torch.cat([hash_of(tensor), size.view(torch.int64)]))

    def read(self) -> list[Value]:
        """Return them, in the order in which they were added. Waits for the device."""
        if not self._prints:
            return []
        return [
            Value(name, (first, second), struct.unpack("d", struct.pack("q", size))[0])
            for name, (first, second, size) in zip(
                self._names, torch.stack(self._prints).tolist(), strict=True
            )
        ]

    def of_modules(self, task: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Add what each module returns within the context."""

        def record(name: str, output: Any) -> None:
            for place, tensor in tensors_in(output, f"the output of {name}"):
                self.add(place, tensor)

        return outputs_of_modules(task, record)


def _size(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    numbers = dense.abs() if dense.is_complex() else dense
    return numbers.double().abs().mean().reshape(1)


@contextlib.contextmanager
def outputs_of_modules(
    task: nn.Module,
    leave: Callable[[str, Any], None],
    enter: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Within the context, call `leave` with the name of each module of a task and what it returns,
    and `enter` with its name before that.
    """
    handles = []
    for name, module in task.named_modules():
        if module is task:
            continue
        handles.append(
            module.register_forward_hook(lambda _m, _in, output, name=name: leave(name, output))
        )
        if enter is not None:
            handles.append(
                module.register_forward_pre_hook(lambda _m, _in, name=name, call=enter: call(name))
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_difference(
    ours: Sequence[Value], theirs: Sequence[Value], bounds: Mapping[str, float] | None
) -> str | None:
    """Return the name of the first value that differs, None if none does.

    Args:
        ours: values of a microbatch.
        theirs: of the same microbatch, computed again.
        bounds: relative differences that the device makes by itself, by name; None: all bits must
            agree.
    """
    for one, other in zip(ours, theirs, strict=False):
        if one.name != other.name:
            return f"the order of modules ({one.name} or {other.name})"
        if one.bits == other.bits:
            continue
        if bounds is None or distance(one.size, other.size) > bounds.get(one.name, 0.0):
            return one.name
    if len(ours) != len(theirs):
        return f"the number of modules ({len(ours)} or {len(theirs)} values)"
    return None


def distance(a: float, b: float) -> float:
    """Return the relative difference of two sizes; inf if just one of them is finite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def bounds_of(runs: Sequence[Sequence[Value]]) -> dict[str, float]:
    """Return for each value by how much it may differ: ten times what repeated runs differ by, and
    at least 1e-6.
    """
    bounds: dict[str, float] = {}
    for values in zip(*runs, strict=False):
        spread = max(distance(values[0].size, value.size) for value in values)
        bounds[values[0].name] = max(1e-6, 10 * spread, bounds.get(values[0].name, 0.0))
    return bounds
