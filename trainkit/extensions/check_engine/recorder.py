"""EngineRecorder: what a run computes in its first steps, for `python -m trainkit check-engine`."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.api.callback import Callback
from trainkit.api.step_call import has_step
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import NonNegativeInt, PositiveInt, checked
from trainkit.device.shards import whole_of
from trainkit.device.sync_guard import allowed_read
from trainkit.engine.base import HandedOn
from trainkit.extensions.check_engine.disturbance import Disturbance
from trainkit.extensions.check_engine.sketch import sketch
from trainkit.extensions.check_engine.watch import MicrobatchWatch, Shapes
from trainkit.extensions.check_engine.without_dropout import switch_off_layers

_WIDTH = 4096  # of a weight
LOSS = "the loss"


@checked
class EngineRecorder(Callback):
    """Records a run: outputs of modules, gradients, weights and buffers of its steps, as sketches.

    Dropout is switched off. Nothing else changes, unless `disturb` is given. It writes
    `record_to`/rank0.pt for each rank, once `steps` steps are over.

    Args:
        record_to: folder of the record.
        steps: that are recorded.
        reference: the record of one process, where shapes of whole tensors are read. None: this is
            it.
        disturb: seed of a rounding error in weights and inputs; 0: none.
        size: of that error, relative.
    """

    config_key = "callbacks.check_engine"
    runs_last = True  # it sees the other callbacks' and the Task's changes
    needs_of_engine = frozenset({"weights", "gradients"})

    def __init__(
        self,
        record_to: str,
        steps: PositiveInt,
        reference: str | None = None,
        disturb: NonNegativeInt = 0,
        size: float = 0.0,
    ) -> None:
        self.record_to = Path(record_to)
        self.steps = steps
        self.reference = reference
        self._disturbance = Disturbance(disturb, size) if disturb else None
        self._record: dict[str, Any] = {}
        self._step: dict[str, Any] = {}
        self._watch: MicrobatchWatch | None = None
        # of microbatches whose backward is not done: a pipeline runs others in between
        self._watches: dict[int, MicrobatchWatch] = {}
        self._with_loss: deque[MicrobatchWatch] = deque()

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Record the weights, and disturb them."""
        ranks = trainer.engine.ranks
        known = None
        if self.reference is not None:
            # weights_only: the record has tensors and plain values alone
            saved = torch.load(Path(self.reference) / "rank0.pt", weights_only=True)
            known = saved["shapes"]
        group = ranks.tensor_size * ranks.context_size  # one of them is 1
        self._shapes = Shapes(known, ranks.rank % group, group, ranks.context_size > 1)
        names: dict[int, list[str]] = {}
        for name, parameter in task.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self._record = {
            "rank": ranks.rank,
            "world_size": ranks.world_size,
            "tensor_size": group,
            "group": "context" if ranks.context_size > 1 else "tensor",
            "pipeline_size": ranks.pipeline_size,
            "data_size": ranks.data_size,
            "elsewhere": list(on_other_stages(task)),
            "dropout": switch_off_layers(task),
            "modules": {name: type(module).__name__ for name, module in task.named_modules()},
            "tied": [own for own in names.values() if len(own) > 1],
            "optimized": self._optimized(trainer, task),
            "steps": [],
        }
        self._record["start"] = self._weights(task)
        vars(task)["training_step"] = self._watched(task, task.training_step)
        if self._disturbance is not None:
            self._disturbance.weights(task)

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        """Open the step's record."""
        self._step = {"microbatches": [], "gradients": {}, "used": {}}
        self._watches.clear()
        self._with_loss.clear()

    def on_train_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int
    ) -> None:
        """Record the samples, and watch the modules from now on."""
        self._close()
        if not self._is_recording:
            return
        self._watch = self._watches[id(batch)] = MicrobatchWatch(batch, self._shapes)
        self._step["microbatches"].append(self._watch.record)
        if self._disturbance is not None:
            self._disturbance.batch(batch)
        self._watch.open(task)

    def on_before_backward(self, trainer: RunView, task: Task, loss: Any) -> None:
        """Record the loss."""
        if self._with_loss:
            self._with_loss.popleft().end_forward(loss)

    def on_after_backward(self, trainer: RunView, task: Task) -> None:
        """Watch nothing any more."""
        self._close()

    def on_before_optimizer_step(self, trainer: RunView, task: Task, optimizer: Any) -> None:
        """Record the step's gradients, before they are clipped."""
        if optimizer is trainer.optimizers[0] and self._is_recording:
            self._step["gradients"] = self._gradients(task)

    def on_after_optimizer_step(self, trainer: RunView, task: Task) -> None:
        """Record the gradients as they were used, the new weights, and the buffers."""
        if not self._is_recording:
            return
        is_clipped = trainer.options.numerics.gradient_clip_val is not None
        if is_clipped or has_step(task, Task, "configure_gradient_clipping"):
            self._step["used"] = self._gradients(task)
        self._step["weights"] = self._weights(task)
        self._step["buffers"] = {
            name: self._sketch(name, buffer)
            for name, buffer in task.named_buffers()
            if name not in self._record["elsewhere"]
        }
        self._record["steps"].append(self._step)
        if len(self._record["steps"]) == self.steps:
            self._write()

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        """Write what there is, if the run has fewer steps."""
        self._close()
        if self._record and len(self._record["steps"]) < self.steps:
            self._write()

    def _watched(self, task: Task, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step in which the modules of its own microbatch are watched: a rank of a pipeline
        may run it for several parts of the model, with other microbatches in between.
        """

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            own = self._watches.get(id(args[0])) if args else None
            if own is not None and own is not self._watch:
                self._close()
                self._watch = own
                own.open(task)
            outputs = step(*args, **kwargs)
            if own is not None and not isinstance(outputs, (HandedOn, NoneType)):
                self._with_loss.append(own)
            return outputs

        return run

    @property
    def _is_recording(self) -> bool:
        return len(self._record["steps"]) < self.steps

    def _write(self) -> None:
        self.record_to.mkdir(parents=True, exist_ok=True)
        self._record["shapes"] = self._shapes.noted()
        torch.save(self._record, self.record_to / f"rank{self._record['rank']}.pt")

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            if self._watch.has_dropped:
                self._record["functional_dropout"] = True
            self._watch = None
        if self._disturbance is not None:
            self._disturbance.restore()

    def _sketch(self, name: str, tensor: Tensor) -> Tensor | str:
        """Return the sketch of a whole weight; a text if it has another shape in one process. Call
        it on all ranks.
        """
        with allowed_read():
            own = whole_of(tensor.detach())
            at = self._shapes.place(f"weight {name}", tuple(own.shape))
            if at is None or not own.numel():
                return f"its shape is {list(own.shape)}"
            return sketch(own, at, 1, _WIDTH)

    def _weights(self, task: Task) -> dict[str, Any]:
        return {
            name: self._sketch(name, each)
            for name, each in task.named_parameters()
            if not each.is_meta
        }

    def _gradients(self, task: Task) -> dict[str, Any]:
        return {
            name: self._sketch(name, torch.zeros_like(each) if each.grad is None else each.grad)
            for name, each in task.named_parameters()
            if each.requires_grad and not each.is_meta
        }

    def _optimized(self, trainer: RunView, task: nn.Module) -> list[str]:
        own = {
            id(parameter)
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return [name for name, parameter in task.named_parameters() if id(parameter) in own]


def on_other_stages(task: nn.Module) -> Iterator[str]:
    """Yield the names of weights and buffers that other stages of a pipeline hold: weights without
    memory, and the buffers beside them.
    """
    yield from (name for name, p in task.named_parameters(remove_duplicate=False) if p.is_meta)
    for name, _ in task.named_buffers(remove_duplicate=False):
        owner = name
        while owner := owner.rpartition(".")[0]:
            weights = list(task.get_submodule(owner).parameters())
            if weights:
                if all(weight.is_meta for weight in weights):
                    yield name
                break
