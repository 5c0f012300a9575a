"""What ranks do together, but for the sums of gradients (reduce/): sums, broadcasts, gathers and
barriers.

Collectives                         every one is called on all ranks that take part, in the same order
    LocalCollectives                one process: its own value is the sum
        simulated.SimulatedCollectives
    horovod/collectives.HorovodCollectives
    ddp/collectives.DDPCollectives
OverData                            the same over the samples: ranks of one model count once
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.ranks import Ranks
from trainkit.errors import EngineError, TrainkitError


class PeerError(EngineError):
    """A collective failed because another rank ended; that rank's own message says why."""


class Collectives(ABC):
    """The collectives of one framework, over the ranks that take part.

    Attributes:
        ranks: this process's place among them.
        outlives_ranks: whether the ranks that are left hold all weights when others are lost,
            though each has a part.
        waits_for_device: whether the host waits for a step's sums until the device has them.
        peer_errors: what the framework raises in a collective if another rank is gone; see also
            `blames_peer`.

    Args:
        heartbeat: is kept informed of what this rank waits for.
    """

    outlives_ranks = False
    waits_for_device = False
    peer_errors: tuple[type[Exception], ...] = ()

    def __init__(self, ranks: Ranks, heartbeat: Heartbeat) -> None:
        self.ranks = ranks
        self._heartbeat = heartbeat

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Report within the context that this rank waits for `what`.

        Raises:
            PeerError: the framework says within the context that another rank is gone. Any other
                error is this rank's own, and stays what it is.
        """
        self._heartbeat.waiting = what
        try:
            yield
        except self.peer_errors as error:
            if not self.blames_peer(error):
                raise
            raise PeerError(f"Another rank ended or sent something else: {error}") from error
        finally:
            self._heartbeat.waiting = ""

    def blames_peer(self, error: Exception) -> bool:
        """Return whether one of `peer_errors` says that another rank is gone, and not that this one
        has failed.
        """
        return True

    def is_loss(self, error: BaseException | None) -> bool:
        """Return whether an error that has ended an attempt of an elastic fit is the loss of ranks."""
        return isinstance(error, PeerError)

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks of a tensor of any dtype but bool;
        shape and dtype are equal on all ranks.
        """

    @abstractmethod
    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors on all ranks with those of rank 0, bit for bit,
        any dtype and layout.
        """

    @abstractmethod
    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value on all ranks. The value is pickled."""

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of ranks. The values are pickled."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have called it."""

    def start_gather(self, own: Tensor) -> Callable[[], Tensor]:
        """Start to gather bytes, and return the function that waits for them.

        Args:
            own: uint8, flat, of any length on each rank. Cheapest if each rank's length stays the
                same.

        Returns:
            A function that returns the bytes of all ranks one after the other, in the order of
            ranks.
        """
        everyone = torch.cat(self.all_gather_object(own))
        return lambda: everyone

    def sum_number(self, number: int) -> int:
        """Return the sum over ranks of an integer of the host.
        It travels by the host: no device is waited for.
        """
        if self.ranks.world_size == 1:
            return number
        return int(self.all_reduce(torch.tensor(number, dtype=torch.int64)))

    def start_sum(self, number: int) -> Callable[[], int]:
        """Start what `sum_number` does, one at a time,
        and return the function that waits for it.
        """
        total = self.sum_number(number)
        return lambda: total

    def all_or_none(self, call: Callable[[], Any]) -> Any:
        """Return what `call` returns, if it does so on all ranks that hold the weights together
        with this one (engine=fsdp in an elastic job).

        Raises:
            PeerError: it raised one on one of them.
        """
        return call()

    def from_living(self, own: Any) -> Any:
        """Return `own`, or if it is None that of a rank which holds the same parts of the weights.
        Only engines whose replicas are replaced have it.
        """
        raise NotImplementedError

    def run_on_main(self, function: Callable[[], Any]) -> Any:
        """Run `function` on rank 0 and return its value on all ranks.

        This is how rank 0 may use files between two collectives: an error there does not leave the
        others blocked.

        Raises:
            TrainkitError: `function` raised it on rank 0; all ranks raise it.
        """
        value = None
        error = None
        if self.ranks.is_main:
            try:
                value = function()
            except TrainkitError as raised:
                error = raised
        value, error = self.broadcast_object((value, error))
        if error is not None:
            raise error
        return value

    def leave(self, key: str, value: bytes) -> None:
        """Leave a message for rank 0. From any thread: it is no collective.
        Only engines that split weights have it.
        """
        raise NotImplementedError

    def take(self, key: str) -> bytes | None:
        """Return, once, what a rank has left under a key, on rank 0;
        None if there is nothing yet. See `leave`.
        """
        raise NotImplementedError

    def statistics_all_reduce(self) -> Callable[[Tensor], Tensor]:
        """Return the all_reduce of synchronised layers,
        which runs beside the sums of gradients during backward.
        """
        return self.all_reduce

    def wait_for_process_set(self) -> None:  # noqa: B027 - only some frameworks have process sets
        """Keep ranks outside a process set from ending, and with them the connections,
        before the set is done.
        """

    def note_end(self, error: BaseException | None) -> None:  # noqa: B027 - Horovod's ranks wait for none
        """Take note of the error that ends an engine's context, if one does."""

    def abort(self) -> None:  # noqa: B027 - Horovod's ranks learn of each other's end by themselves
        """End this rank's waiting for ranks that are gone, with an error where it waits, and let
        the others know that it has left. From any thread.
        """

    # torch.distributed has no settings that only a start reads.
    def disconnect(self) -> None:  # noqa: B027
        """End what outlives an engine's context,
        so that the process's next engine connects the ranks with its own settings.
        """


class LocalCollectives(Collectives):
    """One process."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return a copy."""
        return tensor.clone()

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing: the tensors are rank 0's."""

    def broadcast_object(self, value: Any) -> Any:
        """Return the value."""
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return a list of the one value."""
        return [value]

    def barrier(self) -> None:
        """Do nothing."""


class OverData:
    """Sums and gathers over the samples of a run: ranks that compute one model (engine.tensor,
    engine.pipeline, engine.context) read the same samples and count once, by their first. Results
    are equal on all ranks, bit for bit, so that ranks which decide by them decide alike.

    What splits or counts samples uses `engine.ranks.data_rank` and `data_size`, and these
    collectives in place of `engine.comm`'s. On an engine with one rank a model they are the same.
    """

    def __init__(self, comm: Collectives) -> None:
        self._comm = comm

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over data ranks; see Collectives."""
        return self._comm.all_reduce(
            tensor if self._comm.ranks.counts_samples else torch.zeros_like(tensor)
        )

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all data ranks, in their order; see Collectives."""
        return self._comm.all_gather_object(value)[:: self._comm.ranks.model_size]

    def sum_number(self, number: int) -> int:
        """Return the sum over data ranks of an integer of the host; see Collectives."""
        return self._comm.sum_number(number if self._comm.ranks.counts_samples else 0)
