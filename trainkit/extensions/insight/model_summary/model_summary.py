"""ModelSummary: a table of the model's layers, printed when a fit starts."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import checked
from trainkit.console import show_table
from trainkit.device.sync_guard import allowed_read
from trainkit.device.transfer import to_device
from trainkit.engine.pieces import numel_of
from trainkit.errors import ConfigError
from trainkit.extensions.capsule.batches import tensors_in
from trainkit.extensions.insight.model_summary.layers import Layer, layer_of, layers_of, run

_WIDTH = 120


@checked
class ModelSummary(Callback):
    """Prints name, class, shapes, parameters and FLOPs of each layer on rank 0.

    Shapes and FLOPs (per sample; matrix products, convolutions and attention) come from one
    additional forward in eval mode without gradients. Its input is `task.example_input_array` (a
    tensor, or a tuple of arguments) if the Task has one, otherwise the first training batch's
    inputs, as predict_step gets them. Random states, buffers and modes are restored, so the run
    stays bit-identical. If this forward fails, the table has no shapes and FLOPs, and the reason is
    printed. The banner's model line is controlled by `trainer.enable_model_summary`.

    Args:
        max_depth: levels of nested modules: 1 for the Task's own, -1 for all.
    """

    config_key = "callbacks.model_summary"

    def __init__(self, max_depth: int = 1) -> None:
        if max_depth < -1 or max_depth == 0:
            raise ConfigError(
                f"{self.config_key}.max_depth is {max_depth}; it must be 1 or more, or -1 for all"
                " modules."
            )
        self.max_depth = max_depth
        self.layers: list[Layer] = []
        self._printed = False

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Reset: a second fit prints again; an elastic resume does not."""
        self._printed = False

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        """Print, if the Task declares its inputs."""
        # then a forward gathers weights on all ranks
        takes_part = trainer.is_global_zero or trainer.engine.splits_weights
        self._printed = self._printed or not takes_part or trainer.checkpoints.resumed_from_memory
        example = getattr(task, "example_input_array", None)
        if example is not None and not self._printed:
            args = tuple(example) if isinstance(example, (tuple, list)) else (example,)
            place = (
                trainer.engine.device,
                trainer.precision.input_dtype,
                trainer.options.numerics.uses_channels_last(trainer.engine.device),
            )
            self._print(trainer, task, tuple(to_device(arg, *place) for arg in args))

    def on_train_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int
    ) -> None:
        """Print, now that a batch is available."""
        if not self._printed:
            with allowed_read():
                self._print(
                    trainer, task, (batch[0] if isinstance(batch, (list, tuple)) else batch,)
                )

    def _print(self, trainer: RunView, task: Task, args: tuple[Any, ...]) -> None:
        self._printed = True
        self.layers, why = layers_of(task, self.max_depth), ""
        try:
            run(task, self.layers, args, trainer.precision)
        except Exception as error:  # a forward not written for such inputs may raise anything
            first = (str(error).splitlines() or [""])[0]
            why = (
                f"No shapes: {type(task).__name__}.forward failed on {_describe(args)}"
                f" ({type(error).__name__}: {first})."
            )
            for layer in self.layers:
                layer.inputs = []
                layer.outputs = []
                layer.flops = 0
        if not trainer.is_global_zero:
            return
        others = layer_of("(its own)", type(task).__name__, list(task.parameters(recurse=False)))
        show(
            [*self.layers, *([others] if others.parameters else [])],
            max(1, _rows(args)),
            _bytes(task),
            why,
        )


def show(layers: list[Layer], rows: int, num_bytes: int, why: str) -> None:
    """Print a table of layers, the Task first, after a forward of `rows` samples;
    `why`: why there are no shapes, or "".
    """
    total, *rest = layers
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("layer", "class", *([] if why else ["in", "out"])):
        table.add_column(name, overflow="fold")
    for name in ("parameters", "trainable", *([] if why else ["FLOPs"])):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in rest:
        shapes = [] if why else [_shown(layer.inputs), _shown(layer.outputs)]
        flops = [] if why else [short_number(layer.flops / rows) if layer.flops else "-"]
        numbers = [f"{layer.parameters:,}", f"{layer.trainable:,}"]
        table.add_row(layer.name, layer.kind, *shapes, *numbers, *flops)
    show_table(table, _WIDTH, markup=False)
    parameters = f"{total.parameters:,}, {total.trainable:,} trainable"
    flops_text = (
        f"; forward of a sample: {short_number(total.flops / rows)}FLOPs" if total.flops else ""
    )
    line = (
        f"{total.kind}: parameters {parameters}; {short_number(num_bytes)}B with"
        f" buffers{flops_text}"
    )
    show_table(line, _WIDTH, soft_wrap=True)
    if why:
        show_table(why, _WIDTH, soft_wrap=True, markup=False)


def short_number(value: float) -> str:
    """Format a number with three digits and a decimal prefix, for example "12.3 M"."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


def _shown(shapes: list[list[int]]) -> str:
    return (
        " ".join("x".join(map(str, shape)) or "()" for shape in shapes[:3])
        + " ..." * (len(shapes) > 3)
        if shapes
        else "-"
    )


def _rows(args: tuple[Any, ...]) -> int:
    return next((len(tensor) for _, tensor in tensors_in(args) if tensor.dim()), 1)


def _bytes(task: Task) -> int:
    return sum(
        numel_of(tensor) * tensor.element_size() for tensor in (*task.parameters(), *task.buffers())
    )


def _describe(args: tuple[Any, ...]) -> str:
    tensors = [f"{type(tensor).__name__} {list(tensor.shape)}" for _, tensor in tensors_in(args)]
    return ", ".join(tensors[:3]) if tensors else f"a {type(args[0]).__name__}"
