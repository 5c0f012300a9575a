"""The wall between the loop and the machines: what an engine is.

An engine is a context manager. Inside it knows its place among the ranks, sums gradients over them while backward
runs, and does a few collectives. The loop sees nothing else of Horovod or torch.distributed:

    with engine:
        engine.prepare(model, optimizers)          # rank 0's weights and optimizer state to everyone, gradients hooked
        with engine.no_sync(): engine.backward(loss * share)      # all but the last microbatch of a step
        engine.backward(loss * share)                             # the last one: sums start while it runs
        engine.reduce_gradients()                                 # waits; now p.grad is the sum over ranks, everywhere

Gradients are *summed*. Each rank scales its loss by its share of the step's samples (data/plan.py), so that the sum is
the gradient of the mean over all samples of the step, however unevenly they are split.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainkit.engine.heartbeat import Here, Observed
from trainkit.engine.process_set import Place
from trainkit.engine.sync_batchnorm import convert
from trainkit.errors import ConfigError, EngineError, TrainkitError
from trainkit.launch.environment import Launcher, read_launcher

Device = Literal["auto", "cpu", "cuda"]


class PeerError(EngineError):
    """A collective failed because another rank ended; that rank's own message says why."""


class RanksChanged(EngineError):
    """The launcher has another set of ranks to go on with; raised on all ranks at the same step."""


class Engine(Observed, ABC):
    """The ranks of a run and what they do together.

    Attributes:
        name: "single", "horovod" or "ddp".
        rank: this process among all, from 0 (valid inside the context).
        world_size: number of processes.
        local_rank: this process among those of its host, from 0.
        local_size: number of processes on this host.
        device: where this rank computes.
        told: options that change what is computed or sent, where they are not the defaults; the banner shows them.
        is_elastic: whether ranks may be formed anew while this process lives; set once the context was entered.
        kept_step: the newest step that this process can go on from in memory, -1 for none; an elastic launcher makes the
            process with the newest one rank 0.
        comes_late: whether this process was started to join others that may be training; they wait for it from the moment at
            which it enters the context.
        takes_part: false on a rank outside `engine.process_set`: it enters the engine, does nothing more, and waits at
            its exit until the others have done their work.
    """

    name: str
    peer_errors: tuple[type[Exception], ...] = ()  # what the framework raises where another rank is gone
    takes_part = True
    is_elastic = False
    comes_late = False
    kept_step = -1
    told: dict[str, Any] = {}  # noqa: RUF012 - never written to: engines put their own in its place

    def __init__(self, device: Device = "auto") -> None:
        """Remember the wish for a device; nothing starts before the context is entered."""
        self._device_wish = device
        self.launcher: Launcher = read_launcher()
        self.rank, self.world_size = self.launcher.rank, self.launcher.world_size
        self.local_rank, self.local_size = self.launcher.local_rank, self.launcher.local_size
        self.device = torch.device("cpu")
        self.whereabouts = Here()

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run's files and prints."""
        return self.rank == 0 and self.takes_part

    def __enter__(self) -> Engine:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
        if kind is None:
            self._wait_for_all()  # after an error nobody waits: the launcher ends the other ranks

    def _wait_for_all(self) -> None:  # noqa: B027 - an engine without process sets has nobody to wait for
        """Keep the ranks outside of a process set from ending, and with them the connections, before the others are done."""

    @property
    def first_ranks(self) -> int:
        """The number of ranks that the job was started with."""
        return self.world_size

    @property
    def most_ranks(self) -> int:
        """The number of ranks that there can be while this process lives; 0 where nothing limits it."""
        return self.world_size

    @property
    def ranks_change(self) -> bool:
        """Whether the launcher asks for the ranks to be formed anew. Asks nobody: cheap."""
        return False

    def begin(self, stage: str) -> None:  # noqa: B027 - only an elastic job has ranks that come later
        """Hear what all ranks are about to do: "fit", "validate", "test" or "predict".

        Raises:
            ConfigError: a rank that comes later, and starts the script from its top, would not find the others there.
        """

    def leave(self) -> None:  # noqa: B027 - only an elastic engine's ranks are formed anew
        """Cut the connections, so that entering the engine again joins the ranks that there are then."""

    @property
    def _gpu_number(self) -> int:
        """This rank's among the GPUs of its host."""
        return self.local_rank

    @contextlib.contextmanager
    def _peers(self, what: str) -> Iterator[None]:
        """Say what this rank waits for within the context, and name a collective that fails because another rank is gone."""
        self.whereabouts.waiting = what
        try:
            yield
        except self.peer_errors as error:
            raise PeerError(f"Another rank ended or sent something else: {error}") from error
        finally:
            self.whereabouts.waiting = ""

    def _take_place(self, place: Place) -> None:
        """Count ranks from now on among those of the process set."""
        self.takes_part, self.rank, self.world_size = place.takes_part, place.rank, len(place.ranks)
        self.local_rank, self.local_size = place.local_rank, place.local_size

    def _pin_device(self) -> None:
        """Choose this rank's device by its local rank.

        Raises:
            ConfigError: CUDA was asked for and there is none.
            EngineError: this host has more ranks than GPUs.
        """
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self._device_wish == "cpu" or (self._device_wish == "auto" and gpus == 0):
            self.device = torch.device("cpu")
            if self.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
                # horovodrun leaves each rank a thread per core of the whole host: they would fight over the cores.
                torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.local_size))
            return
        if gpus == 0:
            raise ConfigError("engine.device is 'cuda', but torch sees no GPU here. Use engine.device=cpu.")
        if self.local_size > gpus:
            raise EngineError(
                f"This host runs {self.local_size} ranks and has {gpus} GPU{'s' if gpus > 1 else ''}; each rank needs "
                "its own. Start fewer ranks (-np, --nproc-per-node), or use engine.device=cpu."
            )
        self.device = torch.device("cuda", self._gpu_number)
        torch.cuda.set_device(self.device)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward keeps gradients on this rank: all but the last microbatch of a step."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run backward of a scalar loss. Outside `no_sync` the sums over ranks start while it runs."""
        loss.backward()  # type: ignore[no-untyped-call]

    def run_on_main(self, function: Callable[[], Any]) -> Any:
        """Run `function` on rank 0 and return its value on all ranks; its TrainkitError is raised on all ranks.

        This is how rank 0 may touch files between two collectives without leaving the others waiting for it.
        """
        value, error = None, None
        if self.is_main:
            try:
                value = function()
            except TrainkitError as raised:
                error = raised
        value, error = self.broadcast_object((value, error))
        if error is not None:
            raise error
        return value

    def sum_number(self, number: int) -> int:
        """Return the sum over ranks of a whole number of the host, by way of the host: no device is waited for."""
        if self.world_size == 1:
            return number
        return int(self.all_reduce(torch.tensor(number, dtype=torch.int64)))

    def start_sum(self, number: int) -> Callable[[], int]:
        """Start what `sum_number` does, one at a time, and return the function that waits for it."""
        total = self.sum_number(number)
        return lambda: total

    def convert_sync_batchnorm(self, model: nn.Module) -> nn.Module:
        """Let the BatchNorm layers of `model` take their statistics over all ranks; at one rank nothing changes.

        Each layer changes in place (sync_batchnorm.py), so that parameters, buffers and references stay. Call it on all
        ranks, at any time before the first forward, and only where all ranks take part in each microbatch of each step
        (`check_even`).

        Returns:
            The same model.

        Raises:
            ConfigError: a layer is a BatchNorm with a forward of its own.
        """
        if self.world_size > 1:
            convert(model, self._all_reduce_of_statistics())
        return model

    def _all_reduce_of_statistics(self) -> Callable[[Tensor], Tensor]:
        """Return the all_reduce of layers, which runs beside the sums of gradients during backward."""
        return self.all_reduce

    @abstractmethod
    def _start(self) -> None:
        """Join the other ranks and pin the device."""

    @abstractmethod
    def prepare(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Send rank 0's weights, buffers and optimizer state to all ranks and hook the gradients of `model`."""

    @abstractmethod
    def release(self) -> None:
        """Undo `prepare`. The ranks stay connected, so that fit can be followed by test."""

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Wait until every gradient is the sum over ranks. Call on all ranks, once a step, also without a backward."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks of a tensor of any dtype but bool; shape and dtype are equal on all ranks."""

    @abstractmethod
    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors on all ranks with those of rank 0, bit for bit, any dtype and layout."""

    @abstractmethod
    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value on all ranks. The value is pickled."""

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of ranks. The values are pickled."""

    def start_gather(self, own: Tensor) -> Callable[[], Tensor]:
        """Start to gather the bytes of all ranks (uint8, flat, any number each), and return the function that waits for them.

        Returns them one after the other, in the order of ranks. Cheapest where each rank's number stays.
        """
        everyone = torch.cat(self.all_gather_object(own))
        return lambda: everyone

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks have come here."""
