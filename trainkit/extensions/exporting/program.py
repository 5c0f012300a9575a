"""format=torch_export: the graph of forward with its weights, for torch.export.load,
with a dynamic batch size.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import GraphModule

from trainkit.api.task import Task
from trainkit.errors import TaskError
from trainkit.extensions.exporting.example import is_batch, resized, rows_of

# Exceptions of tracers for a forward that they cannot follow (torch._dynamo's own errors are
# RuntimeErrors).
REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError)


def write(task: Task, args: tuple[Tensor, ...], path: Path) -> bool:
    """Write the task's forward; return whether it accepts any batch size.

    Raises:
        TaskError: torch cannot trace it.
    """
    program, any_batch_size = trace(task, args)
    torch.export.save(program, path)
    return any_batch_size


def load(path: Path) -> Callable[..., Any]:
    """Return the file as a function."""
    module: Callable[..., Any] = torch.export.load(path).module()
    return module


def trace(task: Task, args: tuple[Tensor, ...]) -> tuple[ExportedProgram, bool]:
    """Return the graph of the task's forward, and whether it accepts any batch size; print a line
    if it does not.

    Raises:
        TaskError: torch cannot trace it.
    """
    # 1 is never dynamic: torch treats it as a broadcast size
    several = resized(args, max(2, rows_of(args)))
    shapes, batch = ShapesCollection(), Dim("batch")  # type: ignore[no-untyped-call]
    for arg in several:
        if is_batch(arg, several):
            shapes[arg] = {0: batch}
    try:
        return (
            _without_places(
                torch.export.export(task, several, dynamic_shapes=shapes, strict=False)
            ),
            True,
        )
    except REFUSALS as error:
        refusal = first_line(error)
    try:
        program = torch.export.export(task, args, strict=False)
    except REFUSALS as error:
        raise TaskError(
            f"{type(task).__name__}.forward cannot be traced by torch.export: {first_line(error)}."
            " Replace branches on tensor values by tensor operations (torch.where), or export only"
            " the weights: format=safetensors."
        ) from error
    print(
        f"The file accepts only batches of {rows_of(args)}; torch.export cannot make the size"
        f" dynamic: {refusal}.",
        flush=True,
    )
    return _without_places(program), False


def _without_places(program: ExportedProgram) -> ExportedProgram:
    """Remove the source location of each operation:
    an exported file should not contain this machine's folders.
    """
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
