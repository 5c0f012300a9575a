"""export: writes a Task's forward to a draft file, runs it, compares it with the Task, and moves it
into place.

export -> write (weights.py, huggingface.py, program.py, onnx.py) -> run the draft -> compare ->
rename
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.api.task import Task
from trainkit.device.shards import is_spread
from trainkit.errors import TaskError
from trainkit.extensions.exporting import huggingface, onnx, peft, program, weights
from trainkit.extensions.exporting.compare import difference_of, tolerance_of
from trainkit.extensions.exporting.description import describe, write_description
from trainkit.extensions.exporting.example import example_of, resized, rows_of
from trainkit.extensions.exporting.request import check_format, check_output

Run = Callable[..., Any]


@dataclass(frozen=True)
class Exported:
    """A written and checked file.

    Attributes:
        path: the file.
        num_bytes: its size.
        batch_sizes: batch sizes at which it was compared with the Task.
        any_batch_size: whether it accepts other batch sizes than the example's.
        difference: the largest difference between its outputs and the Task's.
    """

    path: Path
    num_bytes: int
    batch_sizes: list[int]
    any_batch_size: bool
    difference: float


def export(
    task: Task,
    output: str | Path,
    format: str = "safetensors",  # noqa: A002 - the word of the command line
    example_input: Any = None,
    *,
    rebuilt: Task | None = None,
    about: Mapping[str, Any] | None = None,
    beside: Callable[[Path], None] | None = None,
) -> Exported:
    """Write a Task's forward, in evaluation mode, to a file, and compare the file's outputs with
    the Task's.

    Args:
        task: the Task to export; it is restored afterwards.
        output: the file; an existing one is replaced only after the new one has passed the check.
        format: "safetensors" (the weights only), "huggingface" (a folder for `from_pretrained` of
            transformers), "peft" (a folder of adapters for `PeftModel.from_pretrained`),
            "torch_export" (.pt2, for torch.export.load) or "onnx".
        example_input: a tensor, or a tuple of tensors: the arguments of `forward`; the first
            dimension is the batch. None uses the Task's `example_input_array`.
        rebuilt: a second Task of the same kind that takes the weights, for the check of weights;
            without it the Task itself is called with the weights of the file.
        about: how a picture becomes an input, and the classes' names, for the description beside
            the file (`<name>.predict.json`, which `serve` reads); see DataModule.describe_input.
        beside: writes further files into a format's folder, once it is checked.

    Raises:
        ConfigError: format, output or example_input is not legal.
        TaskError: the Task has no `forward`, its weights are split over ranks, it cannot be
            exported, or the file's outputs differ from it.
    """
    check_format(format)
    path = check_output(output, format)
    if getattr(type(task), "forward", None) is nn.Module.forward:
        raise TaskError(
            f"{type(task).__name__} has no forward(), and export writes forward(x). Define it: "
            "`def forward(self, x): return self.model(x)`."
        )
    if any(is_spread(parameter) or parameter.is_meta for parameter in task.parameters()):
        raise TaskError(
            f"This process has no whole weights of this {type(task).__name__}: each rank holds a"
            " part of them after a fit whose engine splits them. Export a checkpoint of the run:"
            f" python -m trainkit export run_dir=FOLDER ckpt_path=last format={format}; or, in a"
            " script without ranks, build the Task with its weights:"
            f" {type(task).__name__}.load_from_checkpoint(PATH)."
        )
    with _still(task):
        args = example_of(task, example_input)
        _call_twice(task, args)
        exported = _write_and_check(task, path, format, args, rebuilt, beside)
    if format not in _OF_WEIGHTS:
        write_description(path, describe(args, exported.any_batch_size, about or {}))
    return exported


def _write_and_check(
    task: Task,
    path: Path,
    kind: str,
    args: tuple[Tensor, ...],
    rebuilt: Task | None,
    beside: Callable[[Path], None] | None,
) -> Exported:
    # In a separate folder instead of under another name: torch writes the file's name into the
    # file.
    with (
        tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder,
        warnings.catch_warnings(),
    ):
        for own in (
            "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
            "The given buffer is not writable",
        ):
            warnings.filterwarnings("ignore", own)  # torch 2.11 warns about its own code
        draft = Path(folder, path.name)
        any_batch_size = _WRITERS[kind](task, args, draft)
        run = (
            _OF_WEIGHTS[kind](draft, task, rebuilt)
            if kind in _OF_WEIGHTS
            else _LOADERS[kind](draft)
        )
        sizes = {rows_of(args): args}
        if any_batch_size:
            sizes[rows_of(args) + 1] = resized(args, rows_of(args) + 1)
        difference = max(_check(task, run, inputs, kind) for inputs in sizes.values())
        if beside is not None and draft.is_dir():
            beside(draft)
        if path.is_dir():  # checked: an earlier export, or empty
            path.replace(Path(folder, "before"))
        draft.replace(path)
    num_bytes = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))
    return Exported(path, num_bytes, list(sizes), any_batch_size, difference)


_WRITERS: dict[str, Callable[[Task, tuple[Tensor, ...], Path], bool]] = {
    "safetensors": weights.write,
    "huggingface": huggingface.write,
    "peft": peft.write,
    "torch_export": program.write,
    "onnx": onnx.write,
}
_OF_WEIGHTS: dict[str, Callable[[Path, Task, Task | None], Run]] = {
    "safetensors": weights.load,
    "huggingface": huggingface.load,
    "peft": peft.load,
}
_LOADERS: dict[str, Callable[[Path], Run]] = {"torch_export": program.load, "onnx": onnx.load}


@contextlib.contextmanager
def _still(task: Task) -> Iterator[None]:
    """Put the Task on the CPU, in evaluation mode, without gradients; restore it afterwards."""
    modes = {module: module.training for module in task.modules()}
    device = task.device
    try:
        task.cpu().eval()
        with torch.no_grad():
            yield
    finally:
        task.to(device)
        for module, mode in modes.items():
            module.training = mode


def _call_twice(task: Task, args: Sequence[Tensor]) -> None:
    """Fail if forward raises on the example, or if its output is not deterministic."""
    name = type(task).__name__
    try:
        first, second = task(*args), task(*args)
    except program.REFUSALS as error:
        shapes = ", ".join(str(list(arg.shape)) for arg in args)
        raise TaskError(
            f"{name}.forward fails on an example of shape {shapes}: {program.first_line(error)}. If"
            " it needs another input, give the Task an attribute example_input_array: a tensor, or"
            " a tuple of tensors."
        ) from error
    if difference_of(first, second, name) > 0:
        raise TaskError(
            f"{name}.forward gives two outputs for one input in evaluation mode: it draws random"
            " numbers, or changes its weights. Do that in training only: `if self.training:`."
        )


def _check(task: Task, run: Run, args: tuple[Tensor, ...], kind: str) -> float:
    """Return the largest difference, or raise if it is too large."""
    expected = task(*args)
    name = type(task).__name__
    difference = difference_of(expected, run(*args), f"the file of format={kind}")
    allowed = 0.0 if kind in _OF_WEIGHTS else tolerance_of(expected)
    if difference > allowed:
        raise TaskError(
            f"The outputs of the format={kind} file differ from {name}.forward: on {rows_of(args)}"
            f" samples the largest difference is {difference:.3g}, and it must be at most"
            f" {allowed:.3g}. Nothing was written. Check whether forward uses anything other than"
            " its arguments, weights and buffers."
        )
    return difference
