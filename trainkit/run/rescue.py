"""Returns a run to the beginning of a failed step, for a checkpoint of the state before it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint.contents import GRADIENTS
from trainkit.checkpoint.stateful import random_state
from trainkit.console import warning
from trainkit.metrics import objects as metric_objects
from trainkit.metrics.log import MetricLog
from trainkit.run.run import Run


@dataclass(frozen=True)
class _Begun:
    step: int
    batch_idx: int
    log: MetricLog
    random: dict[str, Any]
    buffers: dict[str, Tensor]
    undo_metrics: Callable[[], None]


def forget_gradients(run: Run, log: MetricLog, batch_idx: int) -> None:
    """Return to where a run was before this step's gradients:
    the epoch's values and this rank's microbatches as of then.
    """
    run.task.zero_grad(set_to_none=True)
    run.step.log, run.state.batch_idx = log.copy(), batch_idx
    run.step.weights.forget()
    if run.step.finite is not None:
        run.step.finite.forget()


def copies_of(model: nn.Module, before: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of a model's buffers, in the memory of earlier ones if it fits: on a GPU a
    kernel or two for a dtype, as ResNet-50 has 159.
    """
    copies: dict[str, Tensor] = {}
    of_dtype: defaultdict[torch.dtype, list[str]] = defaultdict(list)
    live = {name: buffer.detach() for name, buffer in model.named_buffers()}
    for name, buffer in live.items():
        copy = before.get(name)
        if copy is None or _kind(copy) != _kind(buffer) or buffer.layout is not torch.strided:
            copies[name] = buffer.clone()
        else:
            copies[name] = copy
            of_dtype[buffer.dtype].append(name)
    for names in of_dtype.values():
        torch._foreach_copy_([copies[name] for name in names], [live[name] for name in names])
    return copies


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


class Rescue:
    """The undo of one step of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._begun: _Begun | None = None
        self._copies: dict[str, Tensor] = {}

    def remember(self) -> None:
        """Record this rank's state before a step."""
        run, state = self._run, self._run.state
        self._copies = copies_of(run.task, self._copies)
        undo = metric_objects.remember(metric_objects.metrics_in(run.task))
        self._begun = _Begun(
            state.global_step,
            state.batch_idx,
            run.step.log.copy(),
            random_state(),
            self._copies,
            undo,
        )

    def undo(self) -> dict[str, Any] | None:
        """Return this rank's parts as of the last update; None if there is nothing to save."""
        run, begun = self._run, self._begun
        if run.state.global_step == 0:
            return None
        if run.state.half_updated:
            warning(
                "No checkpoint of this error: it occurred while the weights were being changed."
            )
            return None
        if begun is None or begun.step != run.state.global_step:
            return run.checkpoints.rank_parts()
        waiting: Any = run.checkpoints.contents.rank_parts.get(GRADIENTS)
        if waiting is not None and waiting.began:
            warning(
                "The checkpoint of this error lacks the gradients of the batches since the last"
                " optimizer.step(): the next one counts fewer batches."
            )
        forget_gradients(run, begun.log, begun.batch_idx)
        begun.undo_metrics()
        with torch.no_grad():
            for name, buffer in run.task.named_buffers():
                buffer.copy_(begun.buffers[name])
        return run.checkpoints.rank_parts() | {"random": begun.random}
