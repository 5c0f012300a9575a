"""Watch: records the losses, the first non-finite module and
the largest values of a replayed step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.api.callback import Callback
from trainkit.extensions.capsule.batches import tensors_in


@dataclass(frozen=True)
class ModuleOutput:
    """The output of a module, over all its calls."""

    name: str  # its name in the task
    kind: str  # name of its class
    largest: float  # the largest absolute finite value
    finite: bool  # whether all values were finite
    inputs_finite: bool  # whether its inputs were


class Watch(Callback):
    """Records losses and modules' outputs,
    and restores the random states before each microbatch.
    """

    def __init__(self, before: Callable[[int], None]) -> None:
        """Set the function that is called before each microbatch, with its number."""
        self._before = before
        self._number = 0
        self.losses: list[Tensor] = []  # return values of training_step
        # output of each module, in the order of first calls
        self.outputs: dict[str, ModuleOutput] = {}
        self.first_bad: ModuleOutput | None = None  # the first non-finite output

    def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        """Restore the random states, before the Task's own hook."""
        self._before(self._number)
        self._number += 1

    def on_before_backward(self, trainer: Any, task: Any, loss: Any) -> None:
        """Record the loss."""
        self.losses.append(loss.detach().clone())

    @contextlib.contextmanager
    def over(self, task: nn.Module) -> Iterator[None]:
        """Record the outputs of all modules of a task within the context."""
        handles = [
            module.register_forward_hook(self._hook(name), with_kwargs=True)
            for name, module in task.named_modules()
            if name
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            finite, largest = _extent(output)
            now = ModuleOutput(
                name, type(module).__name__, largest, finite, _extent((args, kwargs))[0]
            )
            if not finite and self.first_bad is None:
                self.first_bad = now
            before = self.outputs.get(name)
            if before is None or not finite or largest > before.largest:
                self.outputs[name] = now

        return look


def _extent(value: Any) -> tuple[bool, float]:
    """Return whether all floating point values are finite, and the largest absolute finite one."""
    finite = True
    largest = 0.0
    for _, tensor in tensors_in(value):
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
            dense = (
                tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
            )
            size = dense.abs().double()
            good = size.isfinite()
            finite = finite and bool(good.all())
            largest = max(largest, float(torch.where(good, size, 0.0).max()))
    return finite, largest


def bad_inputs(batch: Any, samples: list[int] | None) -> list[str]:
    """Describe non-finite values in a batch, by rows, and by samples of the data set if known."""
    descriptions = []
    for place, tensor in tensors_in(batch):
        if not tensor.is_floating_point() or tensor.dim() == 0 or bool(tensor.isfinite().all()):
            continue
        rows = (~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero()[:, 0].tolist()
        own = (
            [samples[row] for row in rows]
            if samples is not None and len(samples) == len(tensor)
            else None
        )
        text = f"{place} is not finite in row{'s' * (len(rows) > 1)} {_listed(rows)}"
        descriptions.append(
            text
            + (f": sample{'s' * (len(rows) > 1)} {_listed(own)} of the data set" if own else "")
        )
    return descriptions


def _listed(numbers: list[int], most: int = 8) -> str:
    return ", ".join(map(str, numbers[:most])) + ", ..." * (len(numbers) > most)
