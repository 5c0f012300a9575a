"""Replicas that are lost and come back while the others train: engine.replicas in an elastic job.

    a replica       ranks that hold the weights together; torch's own group is theirs, as long as they live.
                    If one is lost, the driver replaces them all.
    between         the ranks at the same place of all replicas hold the same parts: they sum gradients in
                    FSDP2's all-reduce hook, and a new one gets its part from them
    everyone        all else that ranks do together

The last two are made again whenever replicas change; the first is not, so that the weights, which
torch binds to it, stay where they are. A sum between replicas that fails is noted, and backward
ends: FSDP2's own state stays whole, and the replica continues from its last commit.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainkit.engine.collectives import PeerError
from trainkit.engine.ddp.collectives import DDPCollectives, end_at_exit
from trainkit.engine.ddp.endings import end_beside
from trainkit.engine.ddp.sockets import Sockets
from trainkit.engine.ranks import Ranks
from trainkit.engine.sending import overwrite
from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.fsdp.layouts import check_groups
from trainkit.extensions.fsdp.own_group import OwnGroup
from trainkit.launch.environment import read_launcher

Value = TypeVar("Value")


class _Links(NamedTuple):
    """The groups of one generation of ranks."""

    everyone: OwnGroup
    started: OwnGroup  # of sums that are started: see DDPCollectives._group_of_started
    between: OwnGroup
    messages: Any


class ReplicaCollectives(DDPCollectives):
    """The collectives of FSDPEngine in an elastic job. The connections are the process's: engines
    come and go.
    """

    outlives_ranks = True
    _links: ClassVar[_Links | None] = None
    _open: ClassVar[Sockets] = Sockets()  # of the links
    _inner: ClassVar[Sockets] = Sockets()  # of the replica
    _mesh: ClassVar[DeviceMesh | None] = None  # of the replica
    _lost: PeerError | None = None

    @property
    def is_connected(self) -> bool:
        """Whether this process has links to the other replicas."""
        return self._links is not None

    @property
    def _here(self) -> _Links:
        assert self._links is not None, "the engine was entered"
        return self._links

    def connect(self, device: torch.device) -> None:
        """Form the links of this generation, and this rank's replica, unless they are there."""
        self._lost = None
        if self.is_connected:
            return
        ranks, on_gpu = self.ranks, device.type == "cuda"
        store = ranks.meeting_store()
        replica, place = divmod(ranks.rank, ranks.replica_size)
        replicas = ranks.world_size // ranks.replica_size
        of_all = store, ranks.rank, ranks.world_size, on_gpu

        def link() -> None:
            with self.waiting_for("the other ranks to come"), self._open.opening():
                ReplicaCollectives._links = _Links(
                    OwnGroup("everyone", *of_all),
                    OwnGroup("started", *of_all),
                    OwnGroup(f"between-{place}", store, replica, replicas, on_gpu),
                    store.clone(),
                )

        if self._mesh is not None:
            self.all_or_none(link)
            return
        link()
        with self.waiting_for("the other ranks of the replica"), self._inner.opening():
            self._form_replica(device, store, replica, place)

    def _form_replica(self, device: torch.device, store: Any, replica: int, place: int) -> None:
        """Make torch's own group of this rank's replica, and its mesh.

        All ranks of it succeed, or none does, and they do it again when ranks change: a rank that
        has passed the barrier knows that the others have come as far.
        """
        on_gpu, size = device.type == "cuda", self.ranks.replica_size
        tensor = self.ranks.tensor_size
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                device_id=device if on_gpu else None,
                store=dist.PrefixStore(f"replica-{replica}", store),  # type: ignore[attr-defined]
                rank=place,
                world_size=size,
            )
            sizes = (size // tensor, tensor) if tensor > 1 else (size,)
            mesh = init_device_mesh(
                device.type, sizes, mesh_dim_names=("shard", "tensor")[: len(sizes)]
            )
            if tensor > 1:
                mesh._flatten("all")  # see FSDPEngine._split
            dist.barrier()
        except BaseException:
            if dist.is_initialized():
                dist.destroy_process_group()
            raise
        ReplicaCollectives._mesh = mesh
        end_at_exit()
        atexit.register(_drop_links)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of this rank's replica."""
        assert self._mesh is not None, "the engine was entered"
        return self._mesh

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank is of the replica that saves: that of rank 0."""
        return self._here.between.rank == 0

    def disconnect(self) -> None:
        """See Collectives. The replica stays."""
        if self._links is not None:
            self._links.messages.close()
            links: list[Any] = [self._links]
            _drop_links()
            end_beside(links)
            self.ranks.end_meeting()

    def abort(self) -> None:
        """See Collectives."""
        links = self._links
        if links is not None:
            for group in links[:3]:
                group.abort()
        self._open.shut_down()

    def is_loss(self, error: BaseException | None) -> bool:
        """See Collectives. An error of torch's own collectives (of a norm, or of a callback's
        `full_tensor`) is that of this rank's replica, which is lost.
        """
        if isinstance(error, RuntimeError) and self.blames_peer(error):
            self.ranks.lose_replica()
            return True
        return super().is_loss(error)

    # ---- between replicas

    def sum_between(self, gradients: Tensor) -> None:
        """Sum this rank's part of gradients over the replicas, in place; FSDP2's hook in backward.
        A loss is noted: see `check_sums`.
        """
        between = self._here.between
        if self._lost is None and between.size > 1:
            try:
                with self.waiting_for("the sums of gradients"):
                    between.start_sum(gradients).wait()
            except PeerError as lost:
                self._lost = lost
                self.abort()  # another replica may wait for this rank's next sum

    def check_sums(self) -> None:
        """End the step unless all of its sums between replicas are there.

        Raises:
            PeerError: one is not, on this rank or another one of its replica.
        """

        def done() -> None:
            if self._lost is not None:
                raise self._lost

        self.all_or_none(done)

    def all_or_none(self, call: Callable[[], Value]) -> Value:
        """See Collectives."""
        lost, value = None, None
        try:
            value = call()
        except PeerError as error:
            lost = error
            self.abort()
        failed = torch.tensor([int(lost is not None)])
        if self.ranks.replica_size > 1:
            try:
                with self.waiting_for("the other ranks of the replica"):
                    dist.all_reduce(failed)
            except PeerError:
                self.ranks.lose_replica()
                raise
        if failed.item():
            raise lost or PeerError("Another rank of this replica has lost a rank.")
        return value  # type: ignore[return-value]

    def send_within(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors of a replica's ranks with those of its first one."""

        def start(number: int, own: Tensor) -> Callable[[], object]:
            work: Any = dist.broadcast(own, 0, async_op=True)
            return work.wait  # type: ignore[no-any-return]

        if self.ranks.replica_size > 1:
            overwrite(tensors, start)

    def send_between(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite this rank's tensors with those of the rank at its place in the first replica."""
        between = self._here.between
        if between.size > 1:
            here = [tensor for tensor in tensors if tensor.numel()]
            self._agreed(
                "the weights of another replica",
                lambda: overwrite(here, lambda _, own: between.start_broadcast(own).wait),
            )

    def from_living(self, own: Value | None) -> Value:
        """See Collectives."""
        if self.sum_number(own is None) == 0:
            assert own is not None
            return own
        between = self._here.between
        sent: Value | None = self._agreed(
            "the state of another replica", lambda: between.broadcast_object(own)
        )
        if sent is None:
            raise EngineError(
                "The ranks of the replica with the newest commit hold commits of different steps. This"
                " is an error of trainkit; the run resumes from its newest checkpoint when it is"
                " started again."
            )
        return sent if own is None else own

    # ---- all ranks

    def _agreed(self, what: str, call: Callable[[], Any]) -> Any:
        """Return what a collective returns. If it fails on a rank it fails on all of its replica,
        whose next collective another would wait in.
        """

        def waiting() -> Any:
            with self.waiting_for(what):
                return call()

        return self.all_or_none(waiting)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See Collectives."""
        total = tensor.detach().clone().contiguous()
        self._agreed("a sum", lambda: self._here.everyone.start_sum(total).wait())
        return total

    def start_sum(self, number: int) -> Callable[[], int]:
        """See Collectives."""
        what, own = "a sum that was started", torch.tensor([number])
        work = self._agreed(what, lambda: self._here.started.start_sum(own))

        def wait() -> int:
            self._agreed(what, work.wait)
            return int(own)

        return wait

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """See Collectives."""
        everyone, here = self._here.everyone, list(tensors)
        if everyone.size > 1:
            self._agreed(
                "the broadcast of tensors",
                lambda: overwrite(here, lambda _, own: everyone.start_broadcast(own).wait),
            )

    def broadcast_object(self, value: Any) -> Any:
        """See Collectives."""
        everyone = self._here.everyone
        return self._agreed("the broadcast of an object", lambda: everyone.broadcast_object(value))

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Collectives."""
        everyone = self._here.everyone
        values: list[Any] = self._agreed(
            "the gathering of objects", lambda: everyone.gather_objects(value)
        )
        return values

    def barrier(self) -> None:
        """See Collectives."""
        self._agreed("the barrier", self._here.everyone.barrier)

    @property
    def _messages(self) -> Any:
        return self._here.messages


def _drop_links() -> None:
    ReplicaCollectives._links = None


def take_rank(ranks: Ranks, comm: ReplicaCollectives, sizes: tuple[int, int, int]) -> None:
    """Take the ranks of from now on of an elastic job, unless they are connected already.

    Args:
        sizes: the engine's `replicas`, `tensor` and `pipeline`.

    Raises:
        ConfigError: a lost rank would take weights with it that no other has, or numbers of ranks
            are no multiples of a replica's.
    """
    replicas, tensor, pipeline = sizes
    first = ranks.first_world_size
    if replicas == 1 and not ranks.copies:
        raise ConfigError(
            "engine is fsdp, engine.replicas is 1, and the job is elastic: the part of a rank that is"
            " lost would be lost too. Set engine.replicas=2 or more, which divides the"
            f" {first} ranks of the start (-np): the ranks of a replica are lost and replaced"
            " together. Or callbacks.elastic.copies=1: if a rank is lost, all are replaced, and resume"
            " from the memory of the other hosts. Or start with torchrun --max-restarts 3, and let all"
            " ranks resume from the checkpoint: resume=auto run_dir=runs/mine."
        )
    if replicas > 1 and ranks.copies:
        raise ConfigError(
            f"callbacks.elastic.copies is {ranks.copies}, and engine.replicas is {replicas}: another"
            " replica holds the state of each rank already, and copies would have no effect. Set"
            " callbacks.elastic.copies=0, or engine.replicas=1."
        )
    if ranks.copies and ranks.max_world_size not in (0, first):
        raise ConfigError(
            f"--max-np is {ranks.max_world_size}, and callbacks.elastic.copies is {ranks.copies}: the"
            f" weights are in {first} parts (-np), one of each rank. Leave --max-np out; further slots"
            " of -H are spares, for the ranks of a host that is lost."
        )
    if pipeline > 1:
        raise ConfigError(
            f"engine.pipeline is {pipeline}, and the job is elastic: stages of a pipeline cannot be"
            " replaced while the others train. Use engine.pipeline=1, or start with torchrun"
            " --max-restarts 3, with resume=auto run_dir=runs/mine."
        )
    if ranks.context_size > 1:
        raise ConfigError(
            f"engine.context is {ranks.context_size}, and the job is elastic: ranks that share the"
            " tokens of a sample cannot be replaced while the others train. Use engine.context=1, or"
            " start with torchrun --max-restarts 3, with resume=auto run_dir=runs/mine."
        )
    check_groups(first, replicas, tensor)
    ranks.replica_size = size = first // replicas
    for option, number in (("--min-np", ranks.min_world_size), ("--max-np", ranks.max_world_size)):
        if number % size:
            below, above = number // size * size, (number // size + 1) * size
            raise ConfigError(
                f"{option} is {number}, and a replica has {size} ranks (-np is {first},"
                f" engine.replicas is {replicas}), which are lost and replaced together: it must be"
                f" a multiple of {size}, as {f'{below} or ' if below else ''}{above}."
            )
    if not comm.is_connected:
        ranks.join(None)
    now = read_launcher()
    ranks.assign(now.rank, now.world_size, now.local_rank, now.local_size)
