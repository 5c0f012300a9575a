"""The collectives of torch.distributed behind the wall, and the groups of a process set."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # see _leave
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from trainkit.engine.collectives import Collectives
from trainkit.engine.ddp import calls, late_ranks
from trainkit.engine.ddp.endings import end_beside, wait_for_endings
from trainkit.engine.ddp.sockets import Sockets
from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.pinning import gpu_of, require_own, sees_one_of_several
from trainkit.engine.ranks import Ranks
from trainkit.engine.sending import overwrite

# How errors of Gloo, NCCL and torch's own sockets begin or end, if another rank is gone or late.
_OF_PEERS = ("gloo/", "NCCL", "Connection closed", "Connection reset", "timed out", "Timed out")
# What NCCL says of this rank's own device or call, in errors of the same class.
_OF_THIS_RANK = (
    "out of memory",
    "device-side assert",
    "illegal memory access",
    "ncclInvalidUsage",
    "ncclInvalidArgument",
)


def blames_peer(error: Exception) -> bool:
    """Return whether an error of torch says that another rank is gone.

    A GPU reports what it could not do when it is next waited for, usually in a collective: out of
    memory and a failed assertion in a kernel are RuntimeErrors as Gloo's are, and this rank's own.
    """
    if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
        return False
    text = str(error)
    if any(sign in text for sign in _OF_THIS_RANK):
        return False
    is_of_group: bool = isinstance(error, dist.DistError)
    return is_of_group or any(sign in text for sign in _OF_PEERS)


class DDPCollectives(Collectives):
    """The collectives of DDPEngine but for the sums of gradients.

    Attributes:
        group: of the process set; None for all ranks.
    """

    peer_errors = (RuntimeError,)
    _exit_code = 0  # that `_leave` has been given

    def __init__(self, ranks: Ranks, heartbeat: Heartbeat) -> None:
        super().__init__(ranks, heartbeat)
        self.group: dist.ProcessGroup | None = None
        self._everyone: dist.ProcessGroup | None = None  # in which ranks outside of the set wait
        self._statistics: dist.ProcessGroup | None = None  # of synchronised BatchNorm layers
        self._sockets = Sockets()
        # of `start_sum`; None: `group`
        self._started: dist.ProcessGroup | None = None

    def blames_peer(self, error: Exception) -> bool:
        """See Collectives."""
        return blames_peer(error)

    @property
    def is_connected(self) -> bool:
        """Whether torch.distributed runs."""
        return dist.is_initialized()

    def connect(self, device: torch.device) -> None:
        """Start torch.distributed, unless it runs."""
        if self.is_connected:
            return
        on_gpu = device.type == "cuda"
        with self.waiting_for("the other ranks to come"), late_ranks.named(self.ranks):
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            meets = on_gpu and sees_one_of_several(self.ranks)
            rendezvous = _rendezvous(self.ranks, meets)
            if meets:  # now, since NCCL's start would fail for it
                _require_own_gpu(self.ranks, device, rendezvous["store"])
            with self._sockets.opening():
                dist.init_process_group(backend, device_id=device if on_gpu else None, **rendezvous)
                self._started = self._group_of_started()
        end_at_exit()

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Within the context a group of some of the ranks may be made."""
        with self.waiting_for("a group of ranks"), self._sockets.opening():
            yield

    def _group_of_started(self) -> dist.ProcessGroup | None:
        """Return the group of elastic ranks for sums that are started, beside those of gradients.

        If a collective of Gloo fails, what a healthy rank still sends for it has no buffer, and Gloo
        (torch 2.15) reads nothing of that connection any more, not even its end. Another collective
        of the same group that waits there would hold its destructor for half an hour.
        """
        if not self.ranks.is_elastic or self.ranks.world_size == 1:
            return None
        return _group_of(None, backend="gloo")

    def disconnect(self) -> None:
        """See Collectives. Ranks that stay keep their group: torch's store has its addresses, and a
        second group would read them.
        """
        if self.ranks.is_elastic and dist.is_initialized():
            self._statistics = self._started = None
            groups = list(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()
            end_beside(groups)
            self.ranks.end_meeting()

    def note_end(self, error: BaseException | None) -> None:
        """See Collectives: a rank that leaves by `sys.exit(3)` waits for no other, and ends with 3."""
        code = error.code if type(error) is SystemExit else None
        number = code if isinstance(code, int) else int(code is not None)
        if number != DDPCollectives._exit_code:
            DDPCollectives._exit_code = number
            end_at_exit(number)

    def abort(self) -> None:
        """See Collectives. NCCL's part has not run yet."""
        group = dist.group.WORLD
        if group is not None and torch.cuda.is_available():
            group.abort()
        self._sockets.shut_down()

    def narrow(self, chosen: tuple[int, ...]) -> None:
        """Make the groups of a process set, and count ranks from now on among its own.
        Call it on all ranks.
        """
        ranks = self.ranks
        hosts: list[int] = [0] * ranks.world_size
        with self.waiting_for("the process set"):
            dist.all_gather_object(hosts, ranks.rank - ranks.local_rank)
            if self._everyone is None:  # an engine may be entered again
                self.group = _group_of(list(chosen))
                # here, since NCCL wants all ranks for it
                self._statistics = _group_of(list(chosen))
                # The ranks outside wait for as long as the others train.
                self._everyone = _group_of(None, backend="gloo", timeout=timedelta(days=3650))
        ranks.narrow(chosen, hosts)

    def wait_for_process_set(self) -> None:
        """See Collectives."""
        if self._everyone is not None:
            with self.waiting_for("the end of the process set's work"):
                dist.barrier(self._everyone)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See Collectives."""
        return self._sum(tensor, self.group)

    def statistics_all_reduce(self) -> Callable[[Tensor], Tensor]:
        """See Collectives."""
        # torch.distributed matches collectives by their order. A layer's sums and those of
        # gradients come in orders that may differ between ranks (if a branch is idle on one), so
        # they go by different groups.
        if self._statistics is None:
            with self.waiting_for("a group for statistics"), self._sockets.opening():
                self._statistics = _group_of(None)
        group = self._statistics
        return lambda tensor: self._sum(tensor, group)

    def _sum(self, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        total = tensor.detach().clone().contiguous()
        with self.waiting_for("a sum"):
            dist.all_reduce(total, group=group)
        return total

    def start_sum(self, number: int) -> Callable[[], int]:
        """See Collectives."""
        what, own = "a sum that was started", torch.tensor(number, dtype=torch.int64)
        with self.waiting_for(what):
            group = self._started or self.group
            work = dist.all_reduce(own, group=group, async_op=True)

        def wait() -> int:
            with self.waiting_for(what):
                work.wait()
            return int(own)

        return wait

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """See Collectives."""
        if self.ranks.world_size > 1:
            with self.waiting_for("the broadcast of tensors"):
                overwrite(tensors, self._start_broadcast)

    def _start_broadcast(self, number: int, own: Tensor) -> Callable[[], object]:
        work: Any = dist.broadcast(own, self._root, group=self.group, async_op=True)
        return work.wait  # type: ignore[no-any-return]

    def broadcast_object(self, value: Any) -> Any:
        """See Collectives."""
        if self.ranks.world_size == 1:
            return value
        own = calls.here()
        box = [(own, value)]
        with self.waiting_for("the broadcast of an object"):
            dist.broadcast_object_list(box, self._root, group=self.group)
        calls.compare({0: box[0][0], self.ranks.rank: own})
        return box[0][1]

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Collectives."""
        if self.ranks.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.ranks.world_size
        own = calls.here()
        with self.waiting_for("the gathering of objects"):
            dist.all_gather_object(values, (own, value), group=self.group)
        calls.compare({rank: call for rank, (call, _) in enumerate(values)})
        return [value for _, value in values]

    def leave(self, key: str, value: bytes) -> None:
        """See Collectives."""
        self._messages.set(key, value)

    def take(self, key: str) -> bytes | None:
        """See Collectives."""
        if not self._messages.check([key]):
            return None
        value: bytes = self._messages.get(key)
        self._messages.delete_key(key)
        return value

    @functools.cached_property
    def _messages(self) -> Any:
        """The store by which the ranks met,
        by a connection that no start of a group holds while it waits for others.
        """
        return dist.distributed_c10d._get_default_store().clone()

    def barrier(self) -> None:
        """See Collectives."""
        with self.waiting_for("the barrier"):
            dist.barrier(self.group)

    @property
    def _root(self) -> int:
        """Rank 0 of those that take part, as the launcher counts."""
        return 0 if self.group is None else dist.get_process_group_ranks(self.group)[0]


def _group_of(ranks: list[int] | None, **options: Any) -> dist.ProcessGroup | None:
    """Make a group of ranks (None: of all); return None on a rank that is not in it."""
    group = dist.new_group(ranks, **options)
    return group if isinstance(group, dist.ProcessGroup) else None


def _require_own_gpu(ranks: Ranks, device: torch.device, store: Any) -> None:
    """Compare this rank's single GPU with those of its host's other ranks, by the store in which
    they meet.

    Raises:
        EngineError: another one has the same.
    """
    host, uuid = gpu_of(device)
    store.set(f"gpu/{host}/{ranks.local_rank}", uuid)
    others = [number for number in range(ranks.local_size) if number != ranks.local_rank]
    uuids = [store.get(f"gpu/{host}/{number}").decode() for number in others]
    require_own(ranks, (host, uuid), [(host, other) for other in uuids])


def _rendezvous(ranks: Ranks, meets: bool) -> dict[str, Any]:
    """Return the rendezvous of elastic ranks, of ranks that torchrun has restarted, or if the ranks
    must know of each other before their group starts (`meets`); else nothing: torch's own serves.

    With its static rendezvous torchrun keeps one store over restarts, and the ranks would read the
    addresses of dead ones (torch 2.15).
    """
    if (own_store := ranks.meeting_store()) is not None:
        return {"store": own_store, "rank": ranks.rank, "world_size": ranks.world_size}
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" and not meets:
        return {}
    store, rank, world_size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    own: Any = dist.PrefixStore(f"trainkit/{attempt}", store)  # type: ignore[attr-defined]
    return {"store": own, "rank": rank, "world_size": world_size}


def end_at_exit(code: int = 0) -> None:
    """End torch's groups when the interpreter does.

    Args:
        code: of a script's `sys.exit` within a fit; 0: there was none.
    """
    atexit.unregister(_leave)
    atexit.register(_leave, code)


def _leave(code: int) -> None:
    """End the group, and with it Gloo's threads, before the interpreter ends.

    A thread that lives until then may ask for Python's lock, to free a tensor, and abort the
    process. The threads end with the last reference to the group. torch.distributed.nn.functional
    holds the group of the time at which it is imported, as its functions' default, forever, and the
    first step of an optimizer imports it: hence our import of it before there is a group.

    A script that an error has ended waits for nothing: a sum that it has started, and another rank
    never will, would hold it, and with it torchrun, until a timeout. Nor does one that left a fit by
    `sys.exit`: Python has not kept that error, and the others would fail first.
    """
    wait_for_endings()
    if not dist.is_initialized():
        return
    error = getattr(sys, "last_value", None)  # of an error that the script has not caught
    if error is not None:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    if code and dist.get_world_size() > 1:
        _end_now(code)
    groups = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    # torch's caches keep them to the end
    for mesh in [item for item in gc.get_objects() if type(item) is DeviceMesh]:
        vars(mesh).get("_pg_registry", {}).clear()
    _let_go(groups)


def _end_now(code: int) -> None:
    """End this process after what else was to run at its exit, without destructors: those of the
    groups wait. It is what `python -m trainkit` does with an error.

    Python has no way to run only what is left: what has run already, runs again, and may complain
    of it. So nothing of it is printed; the script's own error is by now.
    """
    atexit.unregister(_leave)
    sys.unraisablehook = lambda _: None
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()
    os._exit(code)


def _let_go(groups: list[Any]) -> None:
    """Take groups from all that holds them, such as the modules of a Task that a script has as a
    global; this list, too. All at once: each search walks through every object.
    """
    numbers = {*map(id, groups)}
    # nothing is freed, and no number given again, before this returns
    alive = tuple(groups)
    for holder in gc.get_referrers(*groups):
        if holder is alive:
            continue
        if isinstance(holder, list):
            holder[:] = [None if id(value) in numbers else value for value in holder]
            continue
        held = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        for name in [name for name, value in held.items() if id(value) in numbers]:
            held[name] = None
