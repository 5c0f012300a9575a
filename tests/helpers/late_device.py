"""An accelerator on the CPU whose work runs late: for code that uses streams and events.

What is queued on a stream runs when something waits for it, and not before (or in a random legal
order): a missing wait, or a read by the host that comes too soon, sees memory that holds no result
yet, as NaN or -1, or another tensor's numbers.

    with late_device() as device:           # torch.Stream, torch.Event and torch.accelerator are its own
        there = batch.to(device, non_blocking=True)
        torch.accelerator.synchronize()

It has what matters of a GPU: streams in which work is in order, and unordered between them; events;
pinned memory, which alone is copied without a wait; a caching allocator, which gives a freed block
to the next tensor of its stream at once, unless another stream was recorded for it. It computes
without gradients.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

aten = torch.ops.aten
_NAME = "privateuseone"
_READS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default)


class LateStream:
    """Replaces torch.Stream: work in order.

    Attributes:
        queued, done: numbers of its pieces of work.
    """

    def __init__(self, device: Any = None) -> None:
        self.device = _active().device
        self.queued = self.done = 0
        self._work: deque[tuple[LateStream | None, int, Callable[[], Any]]] = deque()
        self._before: list[LateStream] = []
        _active().streams.append(self)

    def push(
        self, act: Callable[[], Any] = lambda: None, after: tuple[LateStream, int] | None = None
    ) -> None:
        """Queue work; it runs after another stream has done so many pieces."""
        other, number = after or (None, 0)
        with _active().lock:
            self.queued += 1
            self._work.append((other, number, act))
            _active().progress()

    def is_ready(self) -> bool:
        """Return whether its next piece could run now."""
        if not self._work:
            return False
        other, number, _ = self._work[0]
        return other is None or other.done >= number

    def run_next(self) -> None:
        """Run the next piece, and what it waits for."""
        other, number, act = self._work.popleft()
        if other is not None:
            other.run_until(number)
        act()
        self.done += 1
        _active().clock += 1

    def run_until(self, number: int) -> None:
        """Run pieces until so many are done."""
        with _active().lock:
            while self.done < number:
                self.run_next()

    def synchronize(self) -> None:
        """Have the host wait for all of it."""
        self.run_until(self.queued)

    def query(self) -> bool:
        """Return whether all of it is done."""
        return self.done == self.queued

    def wait_stream(self, other: LateStream) -> None:
        """Have later work wait for what is queued there now."""
        self.push(after=(other, other.queued))

    def wait_event(self, event: LateEvent) -> None:
        """Have later work wait for an event."""
        event.wait(self)

    def __enter__(self) -> LateStream:
        self._before.append(_active().current)
        _active().current = self
        return self

    def __exit__(self, *_: object) -> None:
        _active().current = self._before.pop()


class LateEvent:
    """Replaces torch.Event."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False) -> None:
        self._timed = enable_timing
        self._at: tuple[LateStream, int] | None = None
        self._time: int | None = None

    def record(self, stream: LateStream | None = None) -> None:
        """Mark the current end of a stream."""
        stream = stream or _active().current
        self._at = (stream, stream.queued + 1)
        stream.push(self._stamp)

    def _stamp(self) -> None:
        self._time = _active().clock

    def wait(self, stream: LateStream | None = None) -> None:
        """Have later work of a stream wait for it."""
        (stream or _active().current).push(after=self._at)

    def query(self) -> bool:
        """Return whether what it marks is done."""
        return self._at is None or self._at[0].done >= self._at[1]

    def synchronize(self) -> None:
        """Have the host wait for it."""
        if self._at is not None:
            self._at[0].run_until(self._at[1])

    def elapsed_time(self, later: LateEvent) -> float:
        """Return the pieces of work between two events, as milliseconds."""
        if not (self._timed and later._timed):
            raise ValueError("an event without enable_timing")
        if self._time is None or later._time is None:
            raise RuntimeError("the events have not completed")
        return float(later._time - self._time)


class _Block:
    """Memory of the device: returned to its stream if no tensor needs it, as torch's allocator does
    it: at once, also if work that uses it is still queued there.
    """

    def __init__(self, device: LateDevice, size: int) -> None:
        self.device, self.stream, self.size = device, device.current, size
        self.memory = device.take(size)
        self.recorded: set[LateStream] = set()

    def __del__(self) -> None:
        behind = [(stream, stream.queued) for stream in self.recorded]
        self.device.freed.append((self.stream, self.memory, behind))


class LateTensor(torch.Tensor):
    """A tensor of the device."""

    block: _Block
    memory: torch.Tensor  # its numbers, as far as work has run

    @staticmethod
    def __new__(cls, memory: torch.Tensor, block: _Block) -> LateTensor:
        """Wrap a part of a block."""
        made: LateTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=block.device.device,
        )
        made.memory, made.block = memory, block
        return made

    def record_stream(self, stream: Any) -> None:
        """Hold the memory for a stream that has not allocated it."""
        self.block.recorded.add(stream)

    def item(self) -> Any:
        """Wait for the current stream, and read; torch's own asks for a real device."""
        _active().current.synchronize()
        return self.memory.item()

    def tolist(self) -> Any:
        """As item."""
        _active().current.synchronize()
        return self.memory.tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __getitem__(self, index: Any) -> LateTensor:
        return LateTensor(self.memory[index], self.block)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _active().call(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _active().call(func, args, kwargs or {})


class LateDevice:
    """The device.

    Attributes:
        clock: pieces of work that have run.
        current: the current stream.
        pinned: blocks of the host's memory that were pinned.
        freed: blocks without a tensor: their stream, memory, and what must be done before.
        lock: held while pieces of work are queued or run: threads that wait at one time would else
            begin a piece before the one before it has ended.
    """

    active: LateDevice | None = None

    def __init__(self, seed: int | None) -> None:
        LateDevice.active = self
        self.device = torch.device(_NAME, 0)
        self.clock = 0
        self.lock = threading.RLock()
        self.streams: list[LateStream] = []
        self.freed: list[tuple[LateStream, torch.Tensor, list[tuple[LateStream, int]]]] = []
        self.random = None if seed is None else random.Random(seed)
        self.pinned: list[torch.UntypedStorage] = []
        self.current = LateStream()

    def progress(self) -> None:
        """With a seed: run some work that could run now."""
        for _ in range(self.random.randrange(3) if self.random else 0):
            ready = [stream for stream in self.streams if stream.is_ready()]
            if ready:
                assert self.random is not None
                self.random.choice(ready).run_next()

    def synchronize(self, device: Any = None) -> None:
        """Run everything."""
        for stream in self.streams:
            stream.synchronize()

    def take(self, size: int) -> torch.Tensor:
        """Return memory of so many bytes for the current stream: a freed block, or a new one of
        NaN.
        """
        for place, (stream, memory, behind) in enumerate(self.freed):
            is_free = all(other.done >= number for other, number in behind)
            if stream is self.current and len(memory) == size and is_free:
                del self.freed[place]
                return memory
        return torch.full((size,), 255, dtype=torch.uint8)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run or queue an operation."""
        if kwargs.pop("pin_memory", False):
            made = self._pin(func(*args, **kwargs))
            if func.overloadpacket.__name__.startswith("empty"):
                made.untyped_storage().fill_(255)
            return made
        if func is aten._pin_memory.default:
            return self._pin(args[0].clone())
        if func is aten.is_pinned.default:
            return self._is_pinned(args[0])
        if func is aten._to_copy.default and "device" in kwargs:
            return self._to(*args, **kwargs)
        if func is aten.copy_.default and isinstance(args[0], LateTensor) != isinstance(
            args[1], LateTensor
        ):
            return self._copy(*args, **kwargs)
        return self._compute(func, args, kwargs)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned.append(tensor.untyped_storage())
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        own = tensor.untyped_storage().data_ptr()
        return any(0 <= own - pinned.data_ptr() < pinned.nbytes() for pinned in self.pinned)

    def _to(self, source: Any, non_blocking: bool = False, **options: Any) -> Any:
        there = torch.device(options.pop("device"))
        layout = {key: value for key, value in options.items() if key == "memory_format"}
        if there.type == "cpu" and isinstance(source, LateTensor):
            like = torch.empty_like(_meta(source), device="cpu", **layout)
            made = self._pin(_nothing(like.size(), like.stride(), source.dtype))
            self._copy(made, source, non_blocking)
            return made.to(options.get("dtype", source.dtype))
        if there.type == _NAME and not isinstance(source, LateTensor):
            made = self._allocate(aten._to_copy.default(_meta(source), **layout))
            self._copy(made, source, non_blocking)
            if options.get("dtype", made.dtype) == made.dtype:
                return made
            return self._compute(aten._to_copy.default, (made,), options)
        return self._compute(aten._to_copy.default, (source,), options)

    def _copy(self, target: Any, source: Any, non_blocking: bool = False) -> Any:
        """Copy between host and device: only from and to pinned memory the host does not wait."""
        own, other = _memory(target), _memory(source)
        host = other if isinstance(target, LateTensor) else own
        is_pinned = self._is_pinned(host)
        if host is other and not is_pinned:
            other = other.clone()  # staged before the call returns
        self.current.push(lambda: own.copy_(other))
        if not non_blocking or (host is own and not is_pinned):
            self.current.synchronize()
        return target

    def _allocate(self, like: torch.Tensor) -> LateTensor:
        extent = 1 + sum(
            (size - 1) * stride for size, stride in zip(like.size(), like.stride(), strict=True)
        )
        block = _Block(self, max(extent, 1) * like.element_size())
        memory = block.memory.view(like.dtype).as_strided(like.size(), like.stride())
        return LateTensor(memory, block)

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        own = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, LateTensor)]
        makes = torch.device(kwargs.get("device") or "cpu").type == _NAME
        if not own and not makes:
            return func(*args, **kwargs)
        on_host = {key: value for key, value in kwargs.items() if key not in ("device", "layout")}
        inputs = tree_map_only(torch.Tensor, _memory, (args, on_host))
        if own and not makes and kwargs.get("device") is not None:  # empty_like(..., device="cpu")
            return func(*inputs[0], **inputs[1], device=kwargs["device"])
        if func in _READS:
            self.current.synchronize()
            return func(*inputs[0], **inputs[1])
        if func._schema.is_mutable:
            self.current.push(lambda: func(*inputs[0], **inputs[1]))
            return args[0] if func._schema.returns else None
        if func._schema.returns and func._schema.returns[0].alias_info is not None:
            views = func(*inputs[0], **inputs[1])
            return tree_map(lambda view: LateTensor(view, own[0].block), views)
        shapes = tree_map_only(torch.Tensor, _meta, (args, on_host))
        if makes:
            shapes[1]["device"] = torch.device("meta")
        made = tree_map_only(torch.Tensor, self._allocate, func(*shapes[0], **shapes[1]))
        memories = [tensor.memory for tensor in _leaves(made)]

        def run() -> None:
            for memory, result in zip(
                memories, _leaves(func(*inputs[0], **inputs[1])), strict=True
            ):
                memory.copy_(result)

        self.current.push(run)
        return made


def _active() -> LateDevice:
    assert LateDevice.active is not None, "outside of late_device()"
    return LateDevice.active


def _leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    tree_map_only(torch.Tensor, leaves.append, tree)
    return leaves


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.memory if isinstance(tensor, LateTensor) else tensor


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=torch.device("meta")
    )


def _nothing(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty_strided(size, stride, dtype=dtype)
    made.untyped_storage().fill_(255)
    return made


@contextlib.contextmanager
def late_device(seed: int | None = None) -> Iterator[torch.device]:
    """Pretend that torch sees this accelerator, for the calling thread.

    Args:
        seed: of the order in which work runs; None: as late as possible.
    """
    late = LateDevice(seed)
    module: Any = types.ModuleType(f"torch.{_NAME}")
    module.empty_cache = lambda: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    accelerator = {
        "current_stream": lambda device=None: late.current,
        "synchronize": late.synchronize,
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device(_NAME),
        "device_count": lambda: 1,
    }
    with contextlib.ExitStack() as stack:
        # not by mock.patch.dict, which would forget what is imported meanwhile
        sys.modules[module.__name__] = module
        stack.callback(sys.modules.pop, module.__name__)
        stack.enter_context(mock.patch.object(torch, _NAME, module, create=True))
        stack.enter_context(mock.patch.object(torch, "Stream", LateStream))
        stack.enter_context(mock.patch.object(torch, "Event", LateEvent))
        stack.enter_context(mock.patch.multiple(torch.accelerator, **accelerator))
        stack.enter_context(_Mode())
        try:
            yield late.device
        finally:
            LateDevice.active = None
