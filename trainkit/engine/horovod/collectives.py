"""Horovod's collectives behind the wall: by name, within the process set, each with what a rank
waits for in it.

What Horovod 0.28 refuses is bridged: tensors that are not contiguous (channels_last) go as flat
views, bfloat16 goes as float32, and broadcasts go as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor

from trainkit.engine.collectives import Collectives, PeerError
from trainkit.engine.horovod.reduce import ALLREDUCE_TYPES
from trainkit.engine.horovod.waiting import wait_for
from trainkit.engine.ranks import check_ranks
from trainkit.engine.sending import overwrite
from trainkit.errors import EngineError
from trainkit.launch.environment import Launcher


class HorovodCollectives(Collectives):
    """The collectives of HorovodEngine but for the sums of gradients.

    Attributes:
        process_set: the ranks that take part; all, until `connect`.
    """

    peer_errors = (HorovodInternalError,)
    process_set = hvd.global_process_set

    def connect(self, launcher: Launcher, chosen_ranks: list[int] | None) -> None:
        """Start Horovod, unless it runs, make engine.process_set, and assign ranks, counted over
        all processes.

        Raises:
            ConfigError: the process set names ranks that were not started.
            EngineError: Horovod runs in this process already, without this process set.
            PeerError: a rank that was to be met is gone.
        """
        chosen = None if chosen_ranks is None else check_ranks(chosen_ranks, launcher.world_size)
        self.process_set = hvd.global_process_set
        if chosen is not None and len(chosen) < launcher.world_size:
            self.process_set = hvd.ProcessSet(chosen)
        self._heartbeat.waiting = "the other ranks to connect"
        try:
            hvd.init(process_sets=[] if self._is_everyone else [self.process_set])
        except KeyError as error:  # it started earlier in this process, without this set
            raise EngineError(
                f"engine.process_set is {chosen_ranks}, but Horovod runs in this process already,"
                " without this set. Give the first engine of the process this set."
            ) from error
        except (ValueError, RuntimeError) as error:  # a rank that was to be met is gone
            raise PeerError(f"Horovod could not connect the ranks: {error}") from error
        finally:
            self._heartbeat.waiting = ""
        self.ranks.assign(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())

    def disconnect(self) -> None:
        """See Collectives.

        Raises:
            EngineError: Horovod runs on MPI, which a process can start only once: its next start
                would end the process.
        """
        if hvd.mpi_built() and hvd.mpi_enabled():
            raise EngineError(
                "Horovod runs on MPI here, and a process can start MPI only once; this command"
                " starts Horovod again for each setting. Start it with `horovodrun --gloo -np N"
                " ...`, or with torchrun."
            )
        hvd.shutdown()

    def narrow(self) -> None:
        """Count ranks from now on among those of the process set.
        Call it on all ranks that were started.
        """
        if self._is_everyone:
            return
        ranks = self.ranks
        hosts = hvd.allgather(
            torch.tensor([ranks.rank - ranks.local_rank]), name="trainkit.hosts"
        ).tolist()
        ranks.narrow(tuple(self.process_set.ranks), hosts)

    @property
    def _is_everyone(self) -> bool:
        return self.process_set is hvd.global_process_set

    @property
    def _root(self) -> int:
        """Rank 0 of those that take part, as Horovod counts."""
        return 0 if self._is_everyone else int(self.process_set.ranks[0])

    def wait_for_process_set(self) -> None:
        """See Collectives."""
        if not self._is_everyone:
            with self.waiting_for("the end of the process set's work"):
                hvd.barrier()

    def reserve_fusion_buffer(self, device: torch.device) -> None:
        """Have Horovod allocate the buffer in which it joins gradients (HOROVOD_FUSION_THRESHOLD,
        128 MiB by default): its thread does it at the first sum of several tensors, and ends all
        ranks if a GPU has no room by then.
        """
        two = [torch.zeros(1, device=device) for _ in range(2)]
        with self.waiting_for("the first sum"):
            hvd.grouped_allreduce(
                two, op=hvd.Sum, name="trainkit.reserve", process_set=self.process_set
            )

    def statistics_all_reduce(self) -> Callable[[Tensor], Tensor]:
        """See Collectives."""
        # A name for each size: Horovod remembers what it has negotiated by name, and forgets it if
        # the shape changes.
        return lambda tensor: self._sum(tensor, f"trainkit.statistics.{tensor.numel()}")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See Collectives."""
        return self._sum(tensor, "trainkit.all_reduce")

    def _sum(self, tensor: Tensor, name: str) -> Tensor:
        if tensor.is_complex():
            pairs = torch.view_as_real(tensor.detach().resolve_conj())
            return torch.view_as_complex(self._sum(pairs, name))
        wire = tensor.detach().reshape(-1)
        if wire.dtype not in ALLREDUCE_TYPES:
            wire = wire.to(torch.float32 if wire.is_floating_point() else torch.int64)
        with self.waiting_for(name):
            total = wait_for(
                hvd.allreduce_async(
                    wire.contiguous(), op=hvd.Sum, name=name, process_set=self.process_set
                )
            )
        result: Tensor = total.to(tensor.dtype).reshape(tensor.shape)
        return result

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """See Collectives."""
        if self.ranks.world_size > 1:
            with self.waiting_for("the broadcast of tensors"):
                overwrite(tensors, self._start_broadcast)

    def _start_broadcast(self, number: int, own: Tensor) -> Callable[[], object]:
        handle = hvd.broadcast_async_(
            own, self._root, f"trainkit.broadcast.{number}", process_set=self.process_set
        )
        return lambda: wait_for(handle)

    def broadcast_object(self, value: Any) -> Any:
        """See Collectives."""
        if self.ranks.world_size == 1:
            return value
        # Not hvd.broadcast_object: torch.ByteTensor(bytearray) reads byte by byte, 10 s for an
        # optimizer's 70 MB.
        own = _bytes_of(value) if self.ranks.is_main else None
        size = torch.tensor([0 if own is None else len(own)])
        name = "trainkit.broadcast_object"
        given = {"root_rank": self._root, "process_set": self.process_set}
        with self.waiting_for("the broadcast of an object"):
            wait_for(hvd.broadcast_async_(size, name=f"{name}.size", **given))
            sent = torch.empty(int(size), dtype=torch.uint8) if own is None else own
            wait_for(hvd.broadcast_async_(sent, name=name, **given))
        return value if own is not None else cloudpickle.loads(sent.numpy())

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Collectives."""
        # hvd.allgather_object takes no process set.
        own = _bytes_of(value)
        with self.waiting_for("the gathering of objects"):
            sizes = self._gathered(torch.tensor([len(own)]), "trainkit.gather.sizes")
            everyone = self._gathered(own, "trainkit.gather.bytes")
        return [
            cloudpickle.loads(piece.numpy().tobytes())
            for piece in torch.split(everyone, sizes.tolist())
        ]

    def _gathered(self, own: Tensor, name: str) -> Tensor:
        handle = hvd.allgather_async(own, name=name, process_set=self.process_set)
        return wait_for(handle)  # type: ignore[no-any-return]

    def start_sum(self, number: int) -> Callable[[], int]:
        """See Collectives."""
        what = "trainkit.sum.started"
        with self.waiting_for(what):
            own = torch.tensor([number], dtype=torch.int64)
            handle = hvd.allreduce_async_(own, op=hvd.Sum, name=what, process_set=self.process_set)

        def wait() -> int:
            with self.waiting_for(what):
                return int(wait_for(handle))

        return wait

    def start_gather(self, own: Tensor) -> Callable[[], Tensor]:
        """See Collectives."""
        what = "trainkit.gather.started"
        with self.waiting_for(what):
            handle = hvd.allgather_async(own, name=what, process_set=self.process_set)

        def wait() -> Tensor:
            with self.waiting_for(what):
                everyone: Tensor = wait_for(handle)
            return everyone

        return wait

    def barrier(self) -> None:
        """See Collectives."""
        with self.waiting_for("the barrier"):
            hvd.barrier(process_set=self.process_set)


def _bytes_of(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(value)), dtype=torch.uint8)
