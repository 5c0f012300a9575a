"""Layers of a Task: its modules with their shapes, parameters and FLOPs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainkit.api.task import Task
from trainkit.checkpoint.stateful import random_state, set_random_state
from trainkit.device.precision import Precision
from trainkit.engine.pieces import numel_of
from trainkit.extensions.capsule.batches import tensors_in

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


@dataclass
class Layer:
    """A module.

    Attributes:
        name: name in the Task; "" for the Task itself.
        kind: name of its class.
        inputs: shapes of the tensors in its first call.
        outputs: shapes of the tensors that this call returned.
        parameters: number of elements, including those of its submodules.
        trainable: number of elements that have gradients.
        flops: FLOPs of its forward, over all calls, including its submodules; 0 if it did not run.
    """

    name: str
    kind: str
    inputs: list[list[int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    parameters: int = 0
    trainable: int = 0
    flops: int = 0


def layers_of(task: Task, max_depth: int) -> list[Layer]:
    """Return the Task's modules down to a depth (-1 for all), in order;
    the Task itself comes first.
    """
    chosen = [
        (n, m)
        for n, m in task.named_modules()
        if max_depth < 0 or not n or n.count(".") < max_depth
    ]
    return [
        layer_of(name, type(module).__name__, list(module.parameters())) for name, module in chosen
    ]


def layer_of(name: str, kind: str, own: list[nn.Parameter]) -> Layer:
    """Return a layer with these parameters, without shapes."""
    numbers = sum(numel_of(p) for p in own)
    trainable = sum(numel_of(p) for p in own if p.requires_grad)
    return Layer(name, kind, parameters=numbers, trainable=trainable)


def run(task: Task, layers: list[Layer], args: tuple[Any, ...], precision: Precision) -> None:
    """Run `task(*args)` in eval mode without gradients and fill in shapes and FLOPs; all state is
    restored afterwards.

    Raises:
        Exception: any exception of forward.
    """
    known = {layer.name: layer for layer in layers}
    counter = flop_counter()
    handles = []
    with (
        _as_it_was(task),
        torch.compiler.set_stance("force_eager"),
        torch.no_grad(),
        precision.autocast(),
    ):
        task.eval()
        try:
            for name, module in task.named_modules():
                if name in known:
                    handles += _watch(module, known[name], counter)
            with counter:
                task(*args)
        finally:
            for handle in handles:
                handle.remove()


def _watch(module: nn.Module, layer: Layer, counter: FlopCounterMode) -> list[Any]:
    begun: list[int] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        begun.append(counter.get_total_flops())
        layer.inputs = layer.inputs or _shapes((args, kwargs))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        layer.flops += counter.get_total_flops() - begun.pop()
        layer.outputs = layer.outputs or _shapes(output)

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    ]


def _shapes(value: Any) -> list[list[int]]:
    return [list(tensor.shape) for _, tensor in tensors_in(value)]


@contextlib.contextmanager
def _as_it_was(task: Task) -> Iterator[None]:
    modes = [(module, module.training) for module in task.modules()]
    places = [(module, name) for module in task.modules() for name in module._buffers]
    before = [(module, name, _kept(module._buffers[name])) for module, name in places]
    random = random_state()
    try:
        yield
    finally:
        set_random_state(random)
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, (buffer, copy) in before:
                module._buffers[name] = buffer
                if buffer is not None and copy is not None:
                    buffer.copy_(copy)


def _kept(buffer: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return buffer, None if buffer is None else buffer.detach().clone()


def flop_counter() -> FlopCounterMode:
    """Return a context manager that counts the FLOPs run in it."""
    # here: it imports triton, 0.1 s at every start otherwise
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _of_groups})


def _of_groups(left: Any, right: Any, *others: Any, out_shape: Any = None, **options: Any) -> int:
    """Return the FLOPs of products of groups of rows, as of experts; torch counts none."""
    flops: int = 2 * left[-2] * left[-1] * right[-1]
    return flops * left[0] if len(left) == len(right) == 3 else flops
