"""Writes beside training: a step pays for a copy to host memory, a thread does the rest,
one checkpoint at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.format import Snapshot, find_aliases
from trainkit.device.accelerator import has_streams, mark
from trainkit.device.pinned import pinned_like
from trainkit.safety.threads import start_thread


class HostCopy:
    """Copies tensors into host memory that is allocated once and reused by the next copy.

    From an accelerator the copy is only queued: it takes the tensors' values at that point of the stream.
    Only `wait`, which the writing thread calls, waits for it.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Any, ...], Tensor] = {}
        self._is_queued = False
        self._event: torch.Event | None = None

    def take(self, tree: Any, place: tuple[Any, ...] = ()) -> Any:
        """Return `tree` (dicts, lists, tuples, plain values) with each tensor in it copied."""
        if not place:
            self._reserve(tree)
        if isinstance(tree, Tensor):
            return self._copy(tree.detach(), place)
        if isinstance(tree, dict):
            copied = type(tree)()
            for key, value in tree.items():
                copied[key] = self.take(value, (*place, key))
            return copied
        if type(tree) in (list, tuple, set):
            return type(tree)(self.take(value, (*place, i)) for i, value in enumerate(tree))
        return tree

    def _reserve(self, tree: Any) -> None:
        """Pin memory for the tensors of an accelerator that have none yet, together."""
        new = {
            place: tensor
            for place, tensor in _queued(tree)
            if not _is_alike(self._held.get(place), tensor)
        }
        self._held.update(zip(new, pinned_like(list(new.values())), strict=True))

    def mark(self) -> None:
        """Record an event after the queued copies."""
        if self._is_queued:
            self._event = mark()

    def wait(self) -> None:
        """Wait for the queued copies."""
        if self._event is not None:
            self._event.synchronize()

    def _copy(self, tensor: Tensor, place: tuple[Any, ...]) -> Tensor:
        if tensor.layout is not torch.strided:
            return tensor.cpu().clone()
        is_queued = has_streams(tensor.device)
        held = self._held.get(place)
        if held is None or not _is_alike(held, tensor):
            # Of the same layout, so it is one plain copy of memory; the writing thread reorders for
            # the file.
            held = self._held[place] = torch.empty_like(tensor, device="cpu")
        self._is_queued = self._is_queued or is_queued
        return held.copy_(tensor, non_blocking=is_queued)


def _queued(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield the tensors of an accelerator that copies beside its computation, with their places."""
    if isinstance(tree, Tensor):
        if has_streams(tree.device) and tree.layout is torch.strided:
            yield place, tree.detach()
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif type(tree) in (list, tuple, set):
        items = enumerate(tree)
    for key, value in items:
        yield from _queued(value, (*place, key))


def _is_alike(held: Tensor | None, tensor: Tensor) -> bool:
    return held is not None and (held.shape, held.dtype, held.stride()) == (
        tensor.shape,
        tensor.dtype,
        tensor.stride(),
    )


class Writer:
    """Runs one write at a time in a thread; the next waits for it, so they never pile up.

    Attributes:
        on_wait: called each second while a caller waits: a slow disk is no stall.
        unwritten: paths of checkpoints that could not be written.
        num_written: checkpoints that were.
        failure: why the last of the others could not be; "" if there are none.
    """

    def __init__(self) -> None:
        self.host = HostCopy()
        self.on_wait: Callable[[], None] = lambda: None
        self.unwritten: list[str] = []
        self.num_written = 0
        self.failure = ""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def snapshot(
        self, state: Mapping[str, Tensor], training: dict[str, Any] | None, about: dict[str, Any]
    ) -> Snapshot:
        """Copy a checkpoint's contents to the host; waits for the last one to be written."""
        self.wait()
        weights, aliases = find_aliases(state)
        copied = self.host.take({"weights": weights, "training": training})
        self.host.mark()
        return Snapshot(copied["weights"], aliases, copied["training"], about)

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` beside the caller; the next `wait` raises its exception."""
        self.wait()

        def write() -> None:
            self.host.wait()
            work()

        def keep(error: BaseException) -> None:
            self._error = error

        self._thread = start_thread("trainkit-checkpoint", write, keep, daemon=False)

    @property
    def is_busy(self) -> bool:
        """Whether something is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the last work, if any, and call `on_wait` each second."""
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(1.0)
                self.on_wait()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
