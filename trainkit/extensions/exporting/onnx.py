"""format=onnx: the graph of torch.export converted to ONNX operators, checked with onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trainkit.api.task import Task
from trainkit.errors import TaskError
from trainkit.extensions.exporting.program import REFUSALS, first_line, trace

_MOST_BYTES = 2**31 - 1  # protobuf's limit for one file


def write(task: Task, args: tuple[Tensor, ...], path: Path) -> bool:
    """Write the task's forward, including weights, as one file; return whether it accepts any batch
    size.

    Raises:
        TaskError: it cannot be traced, has no ONNX equivalent, or is too large for one file.
    """
    name = type(task).__name__
    num_bytes = sum(
        tensor.numel() * tensor.element_size() for tensor in [*task.parameters(), *task.buffers()]
    )
    if num_bytes > _MOST_BYTES:
        raise TaskError(
            f"{name} has {num_bytes / 2**30:.1f} GiB of weights; an ONNX file holds at most 2. Use"
            " format=torch_export."
        )
    program, any_batch_size = trace(task, args)
    try:
        converted = torch.onnx.export(program, dynamo=True, verbose=False)
        assert converted is not None
        converted.save(path, external_data=False)
    except REFUSALS as error:
        raise TaskError(
            f"{name}.forward has no ONNX equivalent: {first_line(error)}. Use format=torch_export."
        ) from error
    return any_batch_size


def load(path: Path) -> Callable[..., list[Tensor]]:
    """Return the file as a function that onnxruntime runs on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(*args: Tensor) -> list[Tensor]:
        inputs = {name: arg.numpy() for name, arg in zip(names, args, strict=True)}
        return [torch.from_numpy(output) for output in session.run(None, inputs)]

    return run
