"""Ranks as threads of one process: the real Trainer, loop and feeds run on each, and an engine in
memory joins them.

    world = World(3)
    results = world.run(lambda engine: fit_something(engine))     # one call in each thread, results in the order of ranks

Random numbers are the process's, and so shared: use tasks without dropout, and data sets that draw
nothing.

Ranks run in `without_collections`: torch.get_rng_state makes a Python object while it holds the
generator's lock. Up to Python 3.11 this can start a collection of cycles, which runs Python code
(gc.callbacks, finalizers) and so may hand the interpreter's lock to another rank, which blocks on
the generator's lock forever.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainkit.device.precision import Precision
from trainkit.engine.base import Engine
from trainkit.engine.collectives import Collectives
from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.ranks import Ranks
from trainkit.engine.sending import send_optimizer_state, tensors_of
from trainkit.launch.environment import read_launcher

_Result = TypeVar("_Result")
_PATIENCE_S = 60


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Within the context the interpreter starts no collection of cycles by itself;
    gc.collect() still works.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class World:
    """The ranks of one process, as threads that exchange values.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._box: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks. They are shared: copy before you write."""
        self._barrier.wait(_PATIENCE_S)  # all have read the earlier exchange
        self._box[rank] = value
        self._barrier.wait(_PATIENCE_S)
        return list(self._box)

    def run(self, work: Callable[[ThreadEngine], _Result]) -> list[_Result]:
        """Call `work` on each rank and return the results in order;
        the first error of a rank is raised here.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def call(rank: int) -> None:
            try:
                results[rank] = work(ThreadEngine(self, rank))
            except threading.BrokenBarrierError:
                errors.append(AssertionError(f"rank {rank} waited for a rank that did not come"))
            except BaseException as error:  # it is raised again below
                errors.insert(0, error)
                self._barrier.abort()

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.size)]
        with without_collections():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return results


class ThreadCollectives(Collectives):
    """The collectives of one rank of a World.

    Args:
        ranks: see Collectives.
        heartbeat: see Collectives.
        world: the ranks; an elastic job replaces it.
        place: this rank in it.
    """

    def __init__(self, ranks: Ranks, heartbeat: Heartbeat, world: World, place: int) -> None:
        super().__init__(ranks, heartbeat)
        self.world, self.place = world, place

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        return self.world.exchange(self.place, value)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See Collectives."""
        first, *others = self.exchange(tensor.clone())
        return sum(others, first.clone())  # type: ignore[no-any-return]

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """See Collectives."""
        with torch.no_grad():
            for tensor in tensors:
                tensor.copy_(self.exchange(tensor.detach().clone())[0])

    def broadcast_object(self, value: Any) -> Any:
        """See Collectives."""
        return pickle.loads(self.exchange(pickle.dumps(value))[0])

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Collectives."""
        return [pickle.loads(held) for held in self.exchange(pickle.dumps(value))]

    def barrier(self) -> None:
        """See Collectives."""
        self.exchange(None)


class ThreadEngine(Engine):
    """One rank of a World, on the CPU; gradients are summed when backward is over."""

    name = "single"
    comm: ThreadCollectives

    def __init__(self, world: World, place: int, ranks: Ranks | None = None) -> None:
        ranks, heartbeat = ranks or Ranks(read_launcher()), Heartbeat()
        super().__init__("cpu", ranks, heartbeat, ThreadCollectives(ranks, heartbeat, world, place))
        self._parameters: list[nn.Parameter] = []

    @property
    def place(self) -> int:
        """This rank, before the engine is entered too."""
        return self.comm.place

    def _start(self) -> None:
        place, size = self.comm.place, self.comm.world.size
        self.ranks.assign(place, size, place, size)
        self.device = torch.device("cpu")

    def prepare(
        self,
        task: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        precision: Precision | None = None,
    ) -> None:
        """See Engine."""
        super().prepare(task, optimizers, precision)
        self.comm.broadcast_tensors(tensors_of(task))
        send_optimizer_state(self.comm, optimizers, self.device)
        self._parameters = list(task.parameters())

    def release(self) -> None:
        """See Engine."""
        super().release()
        self._parameters = []

    def reduce_gradients(self) -> None:
        """See Engine. A parameter without gradient on any rank keeps none."""
        own = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        for parameter, held in zip(
            self._parameters, zip(*self.comm.exchange(own), strict=True), strict=True
        ):
            there = [grad for grad in held if grad is not None]
            parameter.grad = sum(there[1:], there[0].clone()) if there else None
