"""The wall between the loop and the machines: what an engine is.

An engine is a context manager of these facets; the loop sees nothing else of Horovod or
torch.distributed:

    engine.ranks        rank, world_size, local_rank, ...                           ranks.py
    engine.data         sums and gathers in which each sample counts once              collectives.py
    engine.comm         all_reduce, broadcast, gather, barrier, ...                 collectives.py
    engine.heartbeat    what a watchdog and a timeline see of this rank             heartbeat.py
    the step            the methods below, in this order:

    with engine:
        engine.shard(task)                                  # before optimizers are made
        engine.prepare(task, optimizers, precision)         # weights and optimizer state of rank 0 to all, gradients hooked
        with engine.no_sync(): engine.backward(loss * share)    # all but the last microbatch of a step
        engine.backward(loss * share)                           # the last one: sums start while it runs
        engine.finish_gradients(correction)                     # reduce -> unscale -> divide
        engine.step()                                           # update, or held back; clear

Gradients are *summed*. Each rank scales its loss by its share of the step's samples (data/plan.py),
so that the sum is the gradient of the mean over all samples of the step, however unevenly they are
split.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.device.precision import Precision
from trainkit.device.shards import local_of
from trainkit.engine.approximation import Approximation
from trainkit.engine.collectives import Collectives, OverData
from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.pieces import Piece
from trainkit.engine.pinning import DeviceName, pin_device
from trainkit.engine.ranks import Ranks
from trainkit.engine.reduce.reducer import GradientReducer
from trainkit.engine.sending import with_averages
from trainkit.engine.step_settings import StepSettings
from trainkit.errors import ConfigError, TaskError
from trainkit.launch.environment import Launcher, read_launcher
from trainkit.optim.clipping import clear_gradients, clip, multiply, with_gradients
from trainkit.optim.optimizer_state import state_of

Microbatch = TypeVar("Microbatch")
Forwarded = TypeVar("Forwarded")


class HandedOn:
    """What a step returns on a rank whose part of the model another rank's follows:
    the loss, and what the step logs, are that rank's.
    """


@dataclass(frozen=True)
class Calls(Generic[Microbatch, Forwarded]):
    """What a step does with each microbatch.

    Attributes:
        forward: calls the hook before it, and the Task's step.
        again: the step once more, for another part of the model that this rank has.
        backward: of the loss, or of what was handed on.
        leave: calls the hooks after it; in the order of the microbatches.
    """

    forward: Callable[[Microbatch], Forwarded]
    again: Callable[[Forwarded], Forwarded]
    backward: Callable[[Forwarded], None]
    leave: Callable[[Forwarded], None]


class Engine(ABC):
    """The ranks of a run and what they do together.

    Attributes:
        name: "single", "horovod", "ddp", "fsdp" or "deepspeed".
        splits_weights: whether each rank holds a part of the weights (FSDP2): `shard` does it.
        needs_even_rounds: whether all ranks must run as many forwards, since weights are gathered
            in them.
        ranks: this process's place among the ranks.
        comm: the collectives.
        data: those that count samples.
        heartbeat: what others see of this rank while it works.
        device: where this rank computes; valid inside the context.
        launcher: what started this process.
        shown_options: options that change what is computed or sent, if they are not the defaults;
            the banner shows them.
        approximation: what travels in place of exact gradients (trainer.communication).
        saves_together: whether weights and optimizer state are split over ranks, so that one rank
            alone cannot save them.

    Args:
        device: the requested device; nothing is initialised before `__enter__`. For the others see
            the attributes.
    """

    name: str
    splits_weights = False
    needs_even_rounds = False
    shown_options: dict[str, Any] = {}  # noqa: RUF012 - never written to: engines put their own in its place
    saves_together: bool = False

    def __init__(
        self, device: DeviceName, ranks: Ranks, heartbeat: Heartbeat, comm: Collectives
    ) -> None:
        self.launcher: Launcher = read_launcher()
        self.ranks = ranks
        self.heartbeat = heartbeat
        self.comm = comm
        self.data = OverData(comm)
        self.device = torch.device("cpu")
        self._requested_device: DeviceName = device
        self._reducer: GradientReducer | None = None
        self._task: nn.Module | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self._precision: Precision | None = None
        self.clear_gradients: Callable[[], None] = partial(clear_gradients, (), ())
        self.approximation = Approximation(ranks)

    def __enter__(self) -> Engine:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
        self.comm.note_end(error)
        if kind is None:
            # after an error no rank waits: the launcher ends the others
            self.comm.wait_for_process_set()

    @abstractmethod
    def _start(self) -> None:
        """Connect the ranks, assign their numbers, and pin the device."""

    def pin(self) -> torch.device:
        """Make the requested device this rank's, and return it; see pin_device.

        Raises:
            ConfigError: it has no sums over ranks.
        """
        if self._requested_device in ("xpu", "mps") and self.name != "single":
            raise ConfigError(
                f"engine.device is '{self._requested_device}', and the engine is '{self.name}':"
                " ranks have sums on the CPU and on CUDA's GPUs. Start one process, without a"
                " launcher, or use engine.device=cpu."
            )
        self.device = pin_device(self._requested_device, self.ranks)
        return self.device

    # -- the step ---------------------------------------------------------------------------------------------------

    def agree(self, settings: StepSettings) -> None:
        """Take the settings of a fit's steps, or refuse those that this engine cannot serve. Called
        before anything is built.

        Raises:
            ConfigError: it cannot serve one of them.
        """
        self.approximation = settings.communication.begin(
            settings, self.name, self.shown_options, self.comm
        )

    def shard(self, task: nn.Module) -> None:  # noqa: B027 - replicas have nothing to split
        """Split the task's parameters over ranks, before optimizers are made of them.
        Replicas stay whole.
        """

    def prepare(
        self, task: nn.Module, optimizers: Sequence[Optimizer], precision: Precision | None = None
    ) -> None:
        """Give all ranks rank 0's weights, buffers and optimizer state, and hook the task's
        gradients.

        Args:
            task: the model that `backward` runs through.
            optimizers: what `step` updates it with; none for an evaluation.
            precision: unscales and updates; None for plain `optimizer.step()`.
        """
        self.release()
        self._task = task
        self._optimizers = optimizers
        self._precision = precision
        optimized = {
            parameter
            for opt in optimizers
            for group in opt.param_groups
            for parameter in group["params"]
        }
        others = [parameter for parameter in task.parameters() if parameter not in optimized]
        self.clear_gradients = partial(clear_gradients, optimizers, others)

    def release(self) -> None:
        """Undo `prepare`. The ranks stay connected, so that fit can be followed by test."""
        if self._reducer is not None:
            self._reducer.remove()
        self._reducer = self.heartbeat.reducer = None
        self._task = None
        self._optimizers = ()
        self._precision = None
        self.clear_gradients = partial(clear_gradients, (), ())

    def run_microbatches(
        self, microbatches: Iterable[Microbatch], calls: Calls[Microbatch, Forwarded]
    ) -> None:
        """Run forward and backward of each microbatch of a step; backwards in the order of the
        microbatches, each after its forward.
        """
        for microbatch in microbatches:
            forwarded = calls.forward(microbatch)
            calls.backward(forwarded)
            calls.leave(forwarded)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward keeps gradients on this rank:
        all but the last microbatch of a step.
        """
        return contextlib.nullcontext() if self._reducer is None else self._reducer.no_sync()

    def backward(self, loss: Tensor | HandedOn) -> None:
        """Run backward of a scalar loss, or of what this rank has handed on.
        Outside `no_sync` the sums over ranks start while it runs.
        """
        if isinstance(loss, Tensor):
            loss.backward()  # type: ignore[no-untyped-call]

    def reduce_gradients(self, *, gives_up: bool = False) -> None:
        """Wait until every gradient is the sum over ranks.
        Call on all ranks, once a step, also without a backward.

        Args:
            gives_up: this rank had no room for the sums of this step: take part with zeros, so that
                the other ranks, which wait for it, can take the step again together.

        Raises:
            torch.OutOfMemoryError: there is no room; call it again with `gives_up`, or end.
        """
        if self._reducer is not None:
            with self.comm.waiting_for("the sums of gradients"):
                self._reducer.give_up() if gives_up else self._reducer.finish()

    def finish_gradients(
        self,
        correction: Callable[[], Tensor | None] = lambda: None,
        reduced: bool = False,
    ) -> None:
        """Make the gradients those of the step: reduce -> unscale -> multiply by `correction()`.

        Call it on all ranks, once a step, also without a backward.

        Args:
            correction: returns a factor for all gradients, as a scalar tensor, or None for none.
                Called after the gradients are reduced and unscaled, on all ranks: it may contain
                collectives.
            reduced: whether `reduce_gradients` was called in this step already.
        """
        if not reduced:
            self.reduce_gradients()
        if self._precision is not None:
            self._precision.unscale(self._optimizers)
        factor = correction()
        self.approximation.count(factor)
        if factor is not None:
            multiply([parameter.grad for parameter in with_gradients(self._optimizers)], factor)

    def step(self, clip_val: float | None = None, clip_algorithm: str = "norm") -> bool:
        """Clip the gradients and update the weights. The gradients stay until they are cleared,
        before the next backward.

        Args:
            clip_val: the largest norm of all gradients as one vector, or the largest absolute value
                of an element; None clips nothing.
            clip_algorithm: "norm" or "value".

        Returns:
            False if mixed precision held the update back; the same on all ranks.
        """
        clip(self._optimizers, clip_val, clip_algorithm)
        updated = True
        if self._precision is not None and self._precision.scales_loss:
            updated = self._precision.step(self._optimizers)
        else:
            for optimizer in self._optimizers:
                optimizer.step()
        if self.approximation.end_step() and self._reducer is not None:
            self._reducer.remove()
            self._reducer = self.heartbeat.reducer = None
        return updated

    # -- state ------------------------------------------------------------------------------------------------------

    def piece_of(self, tensor: Tensor) -> Piece:
        """Return what this rank holds of a tensor of the task or of an optimizer:
        all of it, unless `shard` has split it.
        """
        return Piece(tensor, (0,) * tensor.dim(), tuple(tensor.shape), self.ranks.is_main)

    def send_buffers(
        self, task: nn.Module, averages: Mapping[Tensor, Tensor] | None = None
    ) -> None:
        """Give all ranks the buffers that are evaluated and saved: rank 0's.

        Args:
            averages: of some buffers, sent beside them.
        """
        self.comm.broadcast_tensors(with_averages(task.buffers(), averages))

    def model_state(self, task: nn.Module) -> dict[str, Tensor]:
        """Return a task's weights and buffers by name, whole; the tensors share the task's memory.

        Call it on all ranks if the engine `saves_together`; then only rank 0 gets them.

        Raises:
            TaskError: its state_dict contains something else.
        """
        state: dict[str, Tensor] = task.state_dict()
        if strange := [name for name, value in state.items() if not hasattr(value, "data_ptr")]:
            kind = type(state[strange[0]]).__name__
            raise TaskError(
                f"{type(task).__name__}.state_dict()['{strange[0]}'] is a {kind}; weights are"
                " tensors. Keep other things in on_save_checkpoint."
            )
        return self.approximation.with_shared(state)

    def optimizer_state(self, optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
        """Return the state_dict of each optimizer, whole; tensors share the optimizer's memory.
        See model_state.
        """
        return [state_of(optimizer) for optimizer in optimizers]

    def weights_here(self, task: nn.Module) -> list[Tensor]:
        """Return the weights, or the parts of them, that this rank holds."""
        here = (parameter for parameter in task.parameters() if not parameter.is_meta)
        return [local_of(parameter.detach()) for parameter in here]
