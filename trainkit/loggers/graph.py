"""Tracing a Task's forward during a run without changing the run."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.api.task import Task


class Forward(nn.Module):
    """A Task's forward without the Task: tracing the Task itself would reach its Trainer."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        for name, child in task.named_children():
            self.add_module(name, child)
        self._forward = (task.forward,)

    def forward(self, *args: Tensor) -> Any:
        return self._forward[0](*args)

    @staticmethod
    def example(batch: Any) -> Tensor:
        """Return the inputs of a batch: the batch, or its first part, is a tensor.

        Raises:
            TypeError: it is not a tensor.
        """
        first = next(iter(batch.values()), None) if isinstance(batch, Mapping) else batch
        first = next(iter(first), None) if isinstance(first, (tuple, list)) else first
        if not isinstance(first, Tensor):
            raise TypeError(
                f"the batch starts with a {type(first).__name__}, not with the tensor that"
                " forward() takes"
            )
        return first.detach().clone()


@contextlib.contextmanager
def left_as_found(task: Task) -> Iterator[None]:
    """Put a Task into evaluation mode without gradients;
    restore modes, buffers and random states afterwards.
    """
    modes = {module: module.training for module in task.modules()}
    buffers = {name: buffer.detach().clone() for name, buffer in task.named_buffers()}
    devices = (
        [torch.cuda.current_device()]
        if torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        else []
    )
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tracer warnings: a drawing may be incomplete
            task.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        with torch.no_grad():
            for name, buffer in task.named_buffers():
                buffer.copy_(buffers[name])


def why_not(error: Exception) -> str:
    """Return the first line of a tracer's error, which may be pages long."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}".rstrip(": .")
