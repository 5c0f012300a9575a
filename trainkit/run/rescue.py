"""Returns a run to the beginning of a failed step, for a checkpoint of the state before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


class Rescue:
    """The undo of one step of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._begun: _Begun | None = None

    def remember(self) -> None:
        """Record this rank's state before a step."""
        run, state = self._run, self._run.state
        buffers = {name: buffer.detach().clone() for name, buffer in run.task.named_buffers()}
        undo = metric_objects.remember(metric_objects.metrics_in(run.task))
        self._begun = _Begun(
            state.global_step, state.batch_idx, run.step.log.copy(), random_state(), buffers, undo
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
        forget_gradients(run, begun.log, begun.batch_idx)
        begun.undo_metrics()
        with torch.no_grad():
            for name, buffer in run.task.named_buffers():
                buffer.copy_(begun.buffers[name])
        return run.checkpoints.rank_parts() | {"random": begun.random}
