"""A microbatch, recorded where it is computed, and computed again with the same weights, samples
and random numbers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.api.step_call import call_step
from trainkit.api.task import LogTarget, Task, loss_of
from trainkit.api.view import RunView
from trainkit.checkpoint.stateful import random_state, set_random_state
from trainkit.device.sync_guard import allowed_read
from trainkit.device.transfer import to_device
from trainkit.extensions.audit.values import Fingerprints, Value
from trainkit.extensions.capsule import batches
from trainkit.metrics.log import MetricLog

_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Inputs:
    """All that a microbatch's numbers follow from, but for the weights.

    Attributes:
        batch: on the host, see checkpoint/batches.py.
        batch_idx: its number.
        random: the random states.
        buffers: of the task, by name, on the host.
        plain: numbers and texts among the attributes of each module, by its name.
        loss_gradient: what backward begins with: share of the step's samples, and loss scale.
    """

    batch: tuple[Any, ...]
    batch_idx: int
    random: dict[str, Any]
    buffers: dict[str, Tensor]
    plain: dict[str, dict[str, Any]]
    loss_gradient: Tensor


class MicrobatchRecording:
    """Records the next microbatch of this rank: what goes in, and the fingerprint of each result.

    Args:
        task: is watched from now on.
        names_modules: whether the outputs of modules are recorded. A compiled module would be
            compiled again for it.
        with_sizes: see Fingerprints.
    """

    def __init__(self, task: Task, names_modules: bool, with_sizes: bool) -> None:
        self._task = task
        self._names_modules = names_modules
        self._values = Fingerprints(with_sizes)
        self._inputs: dict[str, Any] = {}
        self._gradients: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        self._outputs = contextlib.ExitStack()
        self._loss_gradient: Tensor | None = None
        training_step = task.training_step

        @functools.wraps(training_step)
        def recorded(*arguments: Any) -> Any:
            self._begin(*arguments)
            return training_step(*arguments)

        task.__dict__["training_step"] = recorded

    def _begin(self, batch: Any, batch_idx: int = 0) -> None:
        self._task.__dict__.pop("training_step", None)
        with allowed_read():
            self._inputs = {
                "batch": batches.pack(batch),
                "batch_idx": batch_idx,
                "random": random_state(),
                "buffers": {n: b.detach().cpu().clone() for n, b in self._task.named_buffers()},
                "plain": _plain(self._task),
            }
        _add_weights(self._values, self._task)
        if self._names_modules:
            self._outputs.enter_context(self._values.of_modules(self._task))

    def on_loss(self, loss: Tensor) -> None:
        """Before backward: take the loss, and from now on gradients."""
        self._outputs.close()
        self._values.add("the loss", loss)
        if not loss.requires_grad:
            return

        def record_start(grad: Tensor) -> None:
            self._loss_gradient = grad.detach().clone()

        def record(grad: Tensor, name: str) -> None:
            self._gradients[name] = grad.detach().clone()

        self._handles.append(loss.register_hook(record_start))  # type: ignore[no-untyped-call]
        for name, parameter in self._task.named_parameters():
            if parameter.requires_grad:
                hook = functools.partial(record, name=name)
                self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """After backward: watch nothing any more."""
        self._task.__dict__.pop("training_step", None)
        self._outputs.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _add_gradients(self._values, self._task, self._gradients)
        self._gradients = {}

    def result(self) -> tuple[Inputs, list[Value]] | None:
        """Return what was recorded; None if this rank had no microbatch to learn from."""
        if not self._inputs or self._loss_gradient is None:
            return None
        return Inputs(**self._inputs, loss_gradient=self._loss_gradient.cpu()), self._values.read()


def compute_again(
    trainer: RunView, task: Task, inputs: Inputs, names_modules: bool, with_sizes: bool
) -> list[Value]:
    """Run forward and backward of a recorded microbatch; return the fingerprints.

    Gradients, buffers, random numbers, logged values, and the attributes of modules that are
    numbers, texts, tensors, lists or dicts are afterwards what they were.
    """
    values = Fingerprints(with_sizes)
    device = trainer.engine.device
    batch = to_device(batches.unpack(inputs.batch), device)
    with _state_aside(task, inputs):
        _add_weights(values, task)
        with contextlib.ExitStack() as watched:
            if names_modules:
                watched.enter_context(values.of_modules(task))
            with trainer.precision.autocast():
                outputs = call_step(task, "training_step", batch, inputs.batch_idx)
        loss = loss_of(outputs, task)
        values.add("the loss", loss)
        trained = {n: p for n, p in task.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(
            loss, list(trained.values()), inputs.loss_gradient.to(device), allow_unused=True
        )
        own = {n: g for n, g in zip(trained, gradients, strict=True) if g is not None}
        _add_gradients(values, task, own)
    return values.read()


def _add_weights(values: Fingerprints, task: nn.Module) -> None:
    for name, parameter in task.named_parameters():
        values.add(f"the weight {name}", parameter)


def _add_gradients(values: Fingerprints, task: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Add them from the last layer to the first, as backward computes them."""
    for name in reversed([name for name, _ in task.named_parameters()]):
        if name in gradients:
            values.add(f"the gradient of {name}", gradients[name])


def _plain(task: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the numbers and texts among the attributes of each module."""
    return {
        name: {
            key: value
            for key, value in vars(module).items()
            if key not in _OF_TORCH and type(value) in _PLAIN
        }
        for name, module in task.named_modules()
    }


@contextlib.contextmanager
def _state_aside(task: Task, inputs: Inputs) -> Iterator[None]:
    """Give a task the state of the recorded rank within the context, and its own afterwards."""
    own_random = random_state()
    modules = dict(task.named_modules())
    buffers = dict(task.named_buffers())
    own_buffers = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    attributes = [(module, *_attributes(module)) for module in modules.values()]
    target = task._log_target
    try:
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(inputs.buffers[name])
        for name, plain in inputs.plain.items():
            own = modules[name].__dict__
            own.update({key: value for key, value in plain.items() if key in own})
        set_random_state(inputs.random)
        task._log_to(LogTarget(MetricLog(), 1, on_step=True, on_epoch=False))
        yield
    finally:
        task._log_to(target)
        for module, values, contents in attributes:
            module.__dict__.update(values)
            _refill(values, contents)
        now = dict(task.named_buffers())
        with torch.no_grad():
            for name, value in own_buffers.items():
                now[name].copy_(value)
        set_random_state(own_random)


def _attributes(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's attributes that a step may change, and copies of the contents of those that
    it may change in place (torchmetrics objects accumulate so).
    """
    values = {
        key: value
        for key, value in vars(module).items()
        if key not in _OF_TORCH and isinstance(value, (*_PLAIN, Tensor, list, dict))
    }
    contents: dict[str, Any] = {
        key: value.detach().clone() if isinstance(value, Tensor) else value.copy()
        for key, value in values.items()
        if isinstance(value, (Tensor, list, dict))
    }
    return values, contents


def _refill(values: Mapping[str, Any], contents: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for key, content in contents.items():
            value = values[key]
            if isinstance(value, Tensor):
                value.copy_(content)
            elif isinstance(value, list):
                value[:] = content
            else:
                value.clear()
                value.update(content)
