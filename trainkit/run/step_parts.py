"""StepParts: what a training step works with beside the optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from trainkit.data.feed import Microbatch, Step
from trainkit.engine.base import Calls, Engine, HandedOn
from trainkit.errors import TaskError
from trainkit.metrics.log import MetricLog
from trainkit.metrics.objects import EpochMetrics
from trainkit.optim.sample_weights import SampleWeights
from trainkit.run.finite import FiniteLosses, LossWatch

NO_OBJECTS = (
    "trainer.halve_batch_on_oom is true, and {}.training_step logs {} as metric objects, which"
    " would count the samples of a retried step twice. Log plain values there, or set"
    " trainer.halve_batch_on_oom=false."
)
NOT_GUARDED = contextlib.nullcontext()
_USED_GRAPH = (
    "The loss's graph had a backward before this one. Either the step calls loss.backward() itself:"
    " leave it out, backward runs after the step (or set self.automatic_optimization = False). Or"
    " the loss depends on a tensor that an earlier batch made, as a hidden state: keep"
    " tensor.detach()."
)


class Forwarded(NamedTuple):
    """A microbatch between its forward and its backward.

    Attributes:
        outputs: of `training_step`; None if the Task skips the batch.
        batch_idx: its place among this rank's batches of the epoch.
    """

    microbatch: Microbatch
    outputs: Any
    batch_idx: int


def run_backward(engine: Engine, microbatch: Microbatch, loss: Tensor | HandedOn) -> None:
    """Run backward; gradients stay on this rank, unless the microbatch is its last of the step.

    Raises:
        TaskError: the loss's graph had a backward before.
    """
    try:
        if microbatch.is_last:
            engine.backward(loss)
        else:
            with engine.no_sync():
                engine.backward(loss)
    except RuntimeError as error:
        if "through the graph a second time" in str(error):
            raise TaskError(_USED_GRAPH) from error
        raise


class WeightSwitch:
    """What no optimizer but one with `train()` and `eval()` needs; see run/eval_weights.py."""

    def shown(self) -> AbstractContextManager[None]:
        """A context in which the model holds the weights to evaluate."""
        return contextlib.nullcontext()

    def show(self) -> None:
        """Put them into the model for good."""


class OpenBatch(NamedTuple):
    """A microbatch before its on_train_batch_end, and what the hook gets."""

    num_samples: int
    outputs: Any
    batch: Any
    batch_idx: int


@dataclass
class StepParts:
    """What a training step works with beside the optimizers.

    Attributes:
        weights: of the microbatches.
        metrics: the Task's metric objects.
        watch: reports losses that are not finite.
        log: the values of this epoch so far.
        sync_guard: a context that ends the run if the device is read (trainer.assert_no_sync).
        finite: looks at losses (trainer.stop_on_nonfinite).
        halving: takes a step's gradients by a function, and retries it in smaller microbatches
            after another has undone it (trainer.halve_batch_on_oom).
        update: clips and updates; returns whether no overflow held the update back. Engine.step,
            unless the Task wraps it.
        clears_late: whether a hook reads the gradients of the last step (on_before_zero_grad): they
            are then dropped before the next backward, else after the update, when they no longer
            take memory.
        own_clear: of a Task that drops them itself.
        has_old: whether a backward must first drop them.
        has_skipped: whether the Task has skipped a batch of this run.
        num_skipped: batches of this epoch that the Task has skipped, since the start or a resume.
        has_begun: whether a batch of this step has begun.
        num_ahead: batches that have begun, and whose backward is not done; more than one if the
            engine runs several forwards first.
        num_samples: of this step, on all ranks.
        calls: what the engine does with each microbatch of a step; made in the first one.
        open_batch: this rank's last microbatch of the step, whose on_train_batch_end follows the
            update.
        manual: runs a step of a Task that updates its weights itself; returns whether no overflow
            held an update back.
        eval_weights: of optimizers that are evaluated at other weights than they train.
    """

    weights: SampleWeights
    metrics: EpochMetrics
    watch: LossWatch
    update: Callable[[float | None, str], bool]
    clears_late: bool = False
    own_clear: Callable[[], None] | None = None
    has_old: bool = False
    has_begun: bool = False
    has_skipped: bool = False
    num_skipped: int = 0
    num_ahead: int = 0
    num_samples: int = 0
    calls: Calls[Microbatch, Forwarded] | None = None
    open_batch: OpenBatch | None = None
    log: MetricLog = field(default_factory=MetricLog)
    sync_guard: AbstractContextManager[None] = NOT_GUARDED
    finite: FiniteLosses | None = None
    halving: Callable[[Step, Callable[[Step], None], Callable[[], None]], None] | None = None
    manual: Callable[[Step], bool] | None = None
    eval_weights: WeightSwitch = field(default_factory=WeightSwitch)

    def __post_init__(self) -> None:
        self.has_old = self.clears_late
