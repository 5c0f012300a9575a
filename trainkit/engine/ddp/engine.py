"""torch.distributed behind the wall: the engine. How it sums gradients stands in ddp_reduce.py."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # see _leave
from torch import Tensor, nn

from trainkit.arguments import PositiveFloat, checked
from trainkit.engine.base import Device, Engine
from trainkit.engine.ddp.reduce import BucketReducer
from trainkit.engine.options import changed, refusals
from trainkit.engine.process_set import check_ranks, find_place
from trainkit.engine.reduce.buckets import by_size, find_sparse, split_frozen
from trainkit.engine.reduce.wire import make_wire
from trainkit.engine.sending import dense_view, send_optimizer_state, tensors_of
from trainkit.errors import ConfigError, EngineError


@checked
class DDPEngine(Engine):
    """Ranks that torchrun (or anything that sets its variables) started.

    Args:
        device: "auto" takes the GPU of this rank's local rank where there are GPUs.
        compression: "fp16" or "bf16" sends that dtype in place of wider gradients (half the bytes of float32), which is
            the meaning of torch's fp16_compress_hook and bf16_compress_hook; wire.py says what precision it costs.
        op: "average": the mean over the step's samples. "sum": that times the number of ranks, which is the sum of the
            ranks' own means where their shares are equal. "adasum" is refused: it is Horovod's.
        gradient_predivide_factor: gradients are divided by it before the sum and multiplied after it, both in their own
            dtype: below 1 it lifts small gradients above float16's underflow, above 1 it keeps large ones from overflowing.
        bucket_cap_mb: size of a bucket of gradients, in MiB. Smaller buckets start earlier, larger ones cost fewer calls.
        sparse_as_dense: sum the gradients of sparse embeddings as dense ones. Default: they travel as rows, and the
            optimizer gets a sparse gradient as in a single process (SparseAdam needs it). See buckets.find_sparse.
        process_set: the ranks that train, as the launcher counts them; the others wait. Default: all.
    """

    name = "ddp"
    config_key = "engine"
    explained_arguments = refusals("ddp")
    peer_errors = (RuntimeError,)

    def __init__(
        self,
        device: Device = "auto",
        compression: Literal["none", "fp16", "bf16"] = "none",
        op: Literal["average", "sum", "adasum"] = "average",
        gradient_predivide_factor: PositiveFloat = 1.0,
        bucket_cap_mb: PositiveFloat = 25.0,
        sparse_as_dense: bool = False,
        process_set: list[int] | None = None,
    ) -> None:
        super().__init__(device)
        if op == "adasum":
            raise ConfigError(
                "engine.op is 'adasum', which is Horovod's: torch.distributed has none. Start with horovodrun or mpirun, or "
                "use engine.op=average."
            )
        self._compression, self._op, self._predivide = compression, op, gradient_predivide_factor
        self.told = changed(compression=compression, op=op, gradient_predivide_factor=gradient_predivide_factor)
        self._bucket_bytes = int(bucket_cap_mb * 2**20)
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._group: dist.ProcessGroup | None = None  # of the process set; None for all ranks
        self._everyone: dist.ProcessGroup | None = None  # where ranks outside of the set wait
        self._statistics: dist.ProcessGroup | None = None  # of synchronised BatchNorm layers
        self._reducer: BucketReducer | None = None

    def _start(self) -> None:
        if self.launcher.name != "torchrun":
            if self.launcher.world_size > 1:
                raise EngineError(
                    f"engine=ddp, but {self.launcher.name} started {self.launcher.world_size} processes without torchrun's "
                    "variables. Use torchrun, or engine=auto."
                )
            missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
            if missing:
                raise EngineError(
                    f"engine=ddp needs a launcher (not set: {', '.join(missing)}). Start with `torchrun --nproc-per-node 2 "
                    "-m trainkit fit ...`, or use engine=auto."
                )
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world_size)))
        chosen = None if self._process_set is None else check_ranks(self._process_set, self.world_size)
        self._pin_device()
        if not dist.is_initialized():
            on_gpu = self.device.type == "cuda"
            with self._peers("the other ranks to come"):
                backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
                dist.init_process_group(backend, device_id=self.device if on_gpu else None, **_meeting_place())
            atexit.register(_leave)
        if chosen is not None and len(chosen) < self.world_size:
            self._join(chosen)

    def _join(self, chosen: tuple[int, ...]) -> None:
        """Make the groups of a process set; all ranks take part in that."""
        hosts: list[int] = [0] * self.world_size
        with self._peers("the process set"):
            dist.all_gather_object(hosts, self.rank - self.local_rank)
            if self._everyone is None:  # an engine may be entered again
                self._group = _group_of(list(chosen))
                self._statistics = _group_of(list(chosen))  # here, since NCCL wants all ranks for it
                # Those outside wait as long as the others train.
                self._everyone = _group_of(None, backend="gloo", timeout=timedelta(days=3650))
        self._take_place(find_place(chosen, self.rank, hosts))

    def _wait_for_all(self) -> None:
        if self._everyone is not None:
            with self._peers("the end of the process set's work"):
                dist.barrier(self._everyone)

    def prepare(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """See Engine."""
        self.release()
        self.broadcast_tensors(tensors_of(model))
        send_optimizer_state(self, optimizers)
        if self.world_size > 1:
            trained, frozen = split_frozen(model.named_parameters())
            sparse = set() if self._sparse_as_dense else find_sparse(model, optimizers)
            wire = make_wire(self._compression, self._op, self._predivide, self.world_size)
            buckets = by_size(trained, self._bucket_bytes, sparse)
            self._reducer = BucketReducer(buckets, frozen, wire, sparse, self._group)

    def release(self) -> None:
        """See Engine."""
        if self._reducer is not None:
            self._reducer.remove()
            self._reducer = None

    def outstanding(self) -> list[str]:
        """See Engine."""
        return [] if self._reducer is None else self._reducer.outstanding()

    @property
    def sum_settings(self) -> dict[str, Any]:
        """See Engine."""
        return {"wire": self._compression}

    def _recordable(self) -> BucketReducer | None:
        return self._reducer

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """See Engine."""
        return self._reducer.no_sync() if self._reducer is not None else contextlib.nullcontext()

    def reduce_gradients(self) -> None:
        """See Engine."""
        if self._reducer is not None:
            with self._peers("the sums of gradients"):
                self._reducer.finish()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See Engine."""
        return self._sum(tensor, self._group)

    def _all_reduce_of_statistics(self) -> Callable[[Tensor], Tensor]:
        # torch.distributed matches collectives by their order. A layer's sums and those of gradients come in orders that
        # may differ between ranks (where a branch is idle on one), so they go by different groups.
        if self._statistics is None:
            with self._peers("a group for statistics"):
                self._statistics = _group_of(None)
        group = self._statistics
        return lambda tensor: self._sum(tensor, group)

    def _sum(self, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        total = tensor.detach().clone().contiguous()
        with self._peers("a sum"):
            dist.all_reduce(total, group=group)
        return total

    def start_sum(self, number: int) -> Callable[[], int]:
        """See Engine."""
        what, own = "a sum that was started", torch.tensor(number, dtype=torch.int64)
        with self._peers(what):
            work = dist.all_reduce(own, group=self._group, async_op=True)

        def wait() -> int:
            with self._peers(what):
                work.wait()
            return int(own)

        return wait

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """See Engine."""
        if self.world_size == 1:
            return
        sent: list[tuple[Any, Tensor, Tensor]] = []
        with self._peers("the broadcast of tensors"):
            for tensor in tensors:
                flat = dense_view(tensor)
                held = tensor.contiguous().reshape(-1) if flat is None else flat
                work = dist.broadcast(held.view(torch.uint8), self._root, group=self._group, async_op=True)
                sent.append((work, held, tensor))
            for work, held, tensor in sent:
                work.wait()
                if held.data_ptr() != tensor.data_ptr():
                    tensor.copy_(held.reshape(tensor.shape))

    def broadcast_object(self, value: Any) -> Any:
        """See Engine."""
        box = [value]
        with self._peers("the broadcast of an object"):
            dist.broadcast_object_list(box, self._root, group=self._group)
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """See Engine."""
        values: list[Any] = [None] * self.world_size
        with self._peers("the gathering of objects"):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def barrier(self) -> None:
        """See Engine."""
        with self._peers("the barrier"):
            dist.barrier(self._group)

    @property
    def _root(self) -> int:
        """Rank 0 of those that take part, as the launcher counts."""
        return 0 if self._group is None else dist.get_process_group_ranks(self._group)[0]


def _group_of(ranks: list[int] | None, **options: Any) -> dist.ProcessGroup | None:
    """Make a group of ranks (None: of all); return None on a rank that is not in it."""
    group = dist.new_group(ranks, **options)
    return group if isinstance(group, dist.ProcessGroup) else None


def _meeting_place() -> dict[str, Any]:
    """Return where ranks that torchrun has started again meet; nothing for a first start, where they meet as torch says.

    With its static rendezvous torchrun keeps one store over restarts, and the ranks would read the addresses of those
    that are dead (torch 2.15).
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0":
        return {}
    store, rank, world_size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    own: Any = dist.PrefixStore(f"trainkit/{attempt}", store)  # type: ignore[attr-defined]
    return {"store": own, "rank": rank, "world_size": world_size}


def _leave() -> None:
    """End the group, and with it Gloo's threads, before the interpreter ends.

    A thread that lives until then may ask for Python's lock, to let go of a tensor, and abort the process. The threads
    end with the last reference to the group. torch.distributed.nn.functional holds the group of the time at which it is
    imported, as its functions' default, for ever, and the first step of an optimizer imports it: hence our import of it
    before there is a group.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
