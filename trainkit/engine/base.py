"""The wall between the loop and the machines: what an engine is.

An engine is a context manager of four facets; the loop sees nothing else of Horovod or torch.distributed:

    engine.ranks        rank, world_size, local_rank, ...                           ranks.py
    engine.comm         all_reduce, broadcast, gather, barrier, ...                 collectives.py
    engine.heartbeat    what a watchdog and a timeline see of this rank             heartbeat.py
    the step            the methods below, in this order:

    with engine:
        engine.shard(task)                                  # before optimizers are made
        engine.prepare(task, optimizers, precision)         # weights and optimizer state of rank 0 to all, gradients hooked
        with engine.no_sync(): engine.backward(loss * share)    # all but the last microbatch of a step
        engine.backward(loss * share)                           # the last one: sums start while it runs
        engine.finish_gradients(correction, clip_val)           # reduce -> unscale -> divide -> clip
        engine.step()                                           # update, or held back; clear

Gradients are *summed*. Each rank scales its loss by its share of the step's samples (data/plan.py), so that the sum is
the gradient of the mean over all samples of the step, however unevenly they are split.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.device.precision import Precision
from trainkit.engine.collectives import Collectives
from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.pinning import Device, pin_device
from trainkit.engine.ranks import Ranks
from trainkit.engine.reduce.reducer import GradientReducer
from trainkit.engine.sync_batchnorm import convert
from trainkit.errors import TaskError
from trainkit.launch.environment import Launcher, read_launcher
from trainkit.optim.clipping import clear_gradients, clip, with_gradients


class Engine(ABC):
    """The ranks of a run and what they do together.

    Attributes:
        name: "single", "horovod" or "ddp".
        ranks: this process's place among the ranks.
        comm: the collectives.
        heartbeat: what others see of this rank while it works.
        device: where this rank computes; valid inside the context.
        launcher: what started this process.
        shown_options: options that change what is computed or sent, if they are not the defaults; the banner shows them.

    Args:
        device: the requested device; nothing is initialised before `__enter__`. For the others see the attributes.
    """

    name: str
    shown_options: dict[str, Any] = {}  # noqa: RUF012 - never written to: engines put their own in its place

    def __init__(self, device: Device, ranks: Ranks, heartbeat: Heartbeat, comm: Collectives) -> None:
        self.launcher: Launcher = read_launcher()
        self.ranks, self.heartbeat, self.comm = ranks, heartbeat, comm
        self.device = torch.device("cpu")
        self._requested_device: Device = device
        self._reducer: GradientReducer | None = None
        self._task: nn.Module | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._precision: Precision | None = None
        self._not_optimized: list[nn.Parameter] = []

    def __enter__(self) -> Engine:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
        if kind is None:
            self.comm.wait_for_process_set()  # after an error no rank waits: the launcher ends the others

    @abstractmethod
    def _start(self) -> None:
        """Connect the ranks, assign their numbers, and pin the device."""

    def pin(self) -> torch.device:
        """Make the requested device this rank's, and return it; see pin_device."""
        self.device = pin_device(self._requested_device, self.ranks)
        return self.device

    # -- the step ---------------------------------------------------------------------------------------------------

    def shard(self, task: nn.Module) -> None:  # noqa: B027 - replicas have nothing to split
        """Split the task's parameters over ranks, before optimizers are made of them. Replicas stay whole."""

    def prepare(self, task: nn.Module, optimizers: Sequence[Optimizer], precision: Precision | None = None) -> None:
        """Give all ranks rank 0's weights, buffers and optimizer state, and hook the task's gradients.

        Args:
            task: the model that `backward` runs through.
            optimizers: what `step` updates it with; none for an evaluation.
            precision: unscales and updates; None for plain `optimizer.step()`.
        """
        self.release()
        self._task, self._optimizers, self._precision = task, optimizers, precision
        optimized = {parameter for opt in optimizers for group in opt.param_groups for parameter in group["params"]}
        self._not_optimized = [parameter for parameter in task.parameters() if parameter not in optimized]

    def release(self) -> None:
        """Undo `prepare`. The ranks stay connected, so that fit can be followed by test."""
        if self._reducer is not None:
            self._reducer.remove()
        self._sum_by(None)
        self._task, self._optimizers, self._precision, self._not_optimized = None, (), None, []

    def _sum_by(self, reducer: GradientReducer | None) -> None:
        self._reducer = self.heartbeat.reducer = reducer

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward keeps gradients on this rank: all but the last microbatch of a step."""
        return contextlib.nullcontext() if self._reducer is None else self._reducer.no_sync()

    def backward(self, loss: Tensor) -> None:
        """Run backward of a scalar loss. Outside `no_sync` the sums over ranks start while it runs."""
        loss.backward()  # type: ignore[no-untyped-call]

    def reduce_gradients(self) -> None:
        """Wait until every gradient is the sum over ranks. Call on all ranks, once a step, also without a backward."""
        if self._reducer is not None:
            with self.comm.waiting_for("the sums of gradients"):
                self._reducer.finish()

    def finish_gradients(
        self,
        correction: Callable[[], Tensor | None] = lambda: None,
        clip_val: float | None = None,
        clip_algorithm: str = "norm",
        reduced: bool = False,
    ) -> None:
        """Make the gradients those of the step: reduce -> unscale -> multiply by `correction()` -> clip.

        Call it on all ranks, once a step, also without a backward.

        Args:
            correction: returns a factor for all gradients, as a scalar tensor, or None for none. Called after the gradients
                are reduced and unscaled, on all ranks: it may contain collectives.
            clip_val: the largest norm of all gradients as one vector, or the largest absolute value of an element; None
                clips nothing.
            clip_algorithm: "norm" or "value".
            reduced: whether `reduce_gradients` was called in this step already.
        """
        if not reduced:
            self.reduce_gradients()
        if self._precision is not None:
            self._precision.unscale(self._optimizers)
        factor = correction()
        if factor is not None:
            for parameter in with_gradients(self._optimizers):
                parameter.grad.mul_(factor.to(parameter.grad.dtype))
        clip(self._optimizers, clip_val, clip_algorithm)

    def step(self, before_clear: Callable[[Optimizer], None] = lambda optimizer: None) -> bool:
        """Update the weights and clear all gradients of the task.

        Args:
            before_clear: is called with each optimizer, when all have updated and before its gradients are cleared.

        Returns:
            False if mixed precision held the update back; the same on all ranks.
        """
        updated = True
        if self._precision is not None and self._precision.scales_loss:
            updated = self._precision.step(self._optimizers)
        else:
            for optimizer in self._optimizers:
                optimizer.step()
        for optimizer in self._optimizers:
            before_clear(optimizer)
            clear_gradients(optimizer)
        for parameter in self._not_optimized:
            parameter.grad = None  # it would be summed over ranks again and again
        return updated

    # -- state ------------------------------------------------------------------------------------------------------

    def model_state(self, task: nn.Module) -> dict[str, Tensor]:
        """Return a task's weights and buffers by name, whole; the tensors share the task's memory.

        Raises:
            TaskError: its state_dict contains something else.
        """
        state: dict[str, Tensor] = task.state_dict()
        if strange := [name for name, value in state.items() if not hasattr(value, "data_ptr")]:
            kind = type(state[strange[0]]).__name__
            raise TaskError(
                f"{type(task).__name__}.state_dict()['{strange[0]}'] is a {kind}; weights are tensors. "
                "Keep other things in on_save_checkpoint."
            )
        return state

    def optimizer_state(self, optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
        """Return the state_dict of each optimizer, whole; tensors share the optimizer's memory."""
        return [optimizer.state_dict() for optimizer in optimizers]

    def convert_sync_batchnorm(self, model: nn.Module) -> nn.Module:
        """Let the BatchNorm layers of `model` take their statistics over all ranks; at one rank nothing changes.

        Each layer changes in place (sync_batchnorm.py), so that parameters, buffers and references stay. Call it on all
        ranks, at any time before the first forward, and only if all ranks take part in each microbatch of each step
        (`check_even`).

        Returns:
            The same model.

        Raises:
            ConfigError: a layer is a BatchNorm with a forward of its own.
        """
        if self.ranks.world_size > 1:
            convert(model, self.comm.statistics_all_reduce())
        return model
