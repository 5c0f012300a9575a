"""Deferred: a recorded model, of which values are computed one parameter after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from trainkit.engine.deferred.record import Handle, Record, RecordedCall


class Deferred:
    """A model that was recorded; its parameters are meta tensors.

    Args:
        model: made, or completed, within the record.
    """

    def __init__(self, model: nn.Module, record: Record) -> None:
        self._record = record
        self._rng = torch.get_rng_state()
        self._parameters = {
            name: record.handle(parameter)
            for name, parameter in model.named_parameters()
            if parameter.is_meta
        }
        tensors = [
            (table, name, tensor)
            for module in model.modules()
            for table in (module._buffers, vars(module))
            for name, tensor in table.items()
            if isinstance(tensor, Tensor) and tensor.is_meta
        ]
        values = dict(
            self._run({str(i): record.handle(tensor) for i, (_, _, tensor) in enumerate(tensors)})
        )
        for i, (table, name, _) in enumerate(tensors):
            table[name] = values[str(i)]

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and its values on the CPU, as soon as they are complete;
        drop them before the next.
        """
        yield from self._run(self._parameters)

    def _run(self, wanted: Mapping[str, Handle]) -> Iterator[tuple[str, Tensor]]:
        """Yield the wanted values, from the random state of the record's beginning;
        the caller's is as after the record.
        """
        torch.set_rng_state(self._rng)
        todo = _needed(self._record, {handle.block for handle in wanted.values()})
        last = {block: i for i, operation in enumerate(todo) for block in _blocks(operation)}
        names: dict[int, list[str]] = {}
        for name, handle in wanted.items():
            names.setdefault(handle.block, []).append(name)
        memory = {block: tensor.untyped_storage() for block, tensor in self._record.given.items()}
        for block in names.keys() - last.keys():  # torch.empty, and nothing after it; or given
            for name in names[block]:
                yield name, _tensor(wanted[name], memory, self._record.sizes)
        for i, operation in enumerate(todo):
            _execute(operation, memory, self._record.sizes)
            for block in _blocks(operation):
                if last[block] == i:
                    for name in names.get(block, ()):
                        yield name, _tensor(wanted[name], memory, self._record.sizes)
                    if block not in self._record.given:
                        memory.pop(block, None)


def _needed(record: Record, wanted: set[int]) -> list[RecordedCall]:
    """Return the operations that lead to the wanted blocks,
    and those that draw random numbers, in their order.
    """
    live, needed = wanted | {*record.given}, []
    for operation in reversed(record.operations):
        written = {handle.block for handle in operation.written}
        made = {handle.block for handle in operation.made}
        if not live & (written | made):
            if operation.is_random:
                needed.append(operation)
                if operation.overwrites or not operation.read:
                    operation = needed[-1] = _for_numbers(operation)
                live |= operation.read
            continue
        live -= made | (written if operation.overwrites else set())
        live |= operation.read
        needed.append(operation)
    return needed[::-1]


def _for_numbers(operation: RecordedCall) -> RecordedCall:
    return replace(operation, made=[], written=[], overwrites=False, for_numbers=True)


def _blocks(operation: RecordedCall) -> set[int]:
    return operation.read | {handle.block for handle in (*operation.made, *operation.written)}


def _execute(operation: RecordedCall, memory: dict[int, Any], sizes: Mapping[int, int]) -> None:
    scratch: dict[int, Any] = {} if operation.for_numbers else memory

    def value(argument: Any) -> Any:
        if not isinstance(argument, Handle):
            return argument
        return _tensor(argument, memory if argument.block in operation.read else scratch, sizes)

    with torch.no_grad():
        given = (operation.args, dict(operation.kwargs))
        args, kwargs = tree_map(value, given, is_leaf=lambda leaf: isinstance(leaf, Handle))
        result = operation.call(*args, **kwargs)
        if not operation.made:
            return
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for handle, tensor in zip(operation.made, results[-len(operation.made) :], strict=True):
            if (
                tensor.stride() == handle.stride
                and tensor.untyped_storage().nbytes() == sizes[handle.block]
            ):
                memory[handle.block] = tensor.untyped_storage()
            else:
                _tensor(handle, memory, sizes).copy_(tensor)


def _tensor(handle: Handle, memory: dict[int, Any], sizes: Mapping[int, int]) -> Tensor:
    if handle.block not in memory:
        memory[handle.block] = torch.empty(
            sizes[handle.block], dtype=torch.uint8, device=handle.device
        ).untyped_storage()
    empty = torch.empty(0, dtype=handle.dtype, device=handle.device)
    return empty.set_(memory[handle.block], handle.offset, handle.size, handle.stride)
