"""Sums gradients over ranks while backward runs, beside an untouched torch optimizer.

A hook on each parameter fires when its gradient of this backward is complete. When all parameters of a bucket are
ready, the bucket's sum starts; `finish` starts what is left (parameters that took no part) and waits. The engines
supply how a bucket's sum starts and ends; this file knows no framework.

A parameter without gradient takes part with zeros, since the other ranks may have one. Where no rank had one, its
`.grad` is None again afterwards, as in a single process (momentum and weight decay then leave it alone). That needs to
be known on the host, so it waits for the device, but only on ranks that have such a parameter.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.errors import TaskError

NamedParameter = tuple[str, nn.Parameter]


class Bucket:
    """Parameters whose gradients are summed by one collective.

    Attributes:
        index: its place in the order in which sums start.
        entries: name and parameter, in the order of summing.
        waiting: how many gradients of this step are not ready yet.
        handle: what the engine returned when the sum started; None before that.
    """

    def __init__(self, index: int, entries: list[NamedParameter]) -> None:
        """Start with all gradients outstanding."""
        self.index, self.entries = index, entries
        self.waiting = len(entries)
        self.handle: Any = None


class GradientReducer(ABC):
    """Hooks the parameters, keeps the books of one step, and asks the engine for sums.

    Args:
        buckets: groups of parameters; sums start in this order when `in_order`.
        frozen: parameters that need no gradient now; each is taken in when that changes.
        in_order: whether a bucket waits for the one before it (torch.distributed matches collectives by order; Horovod
            by name).
    """

    def __init__(self, buckets: list[list[NamedParameter]], frozen: list[NamedParameter], in_order: bool) -> None:
        self._in_order = in_order
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Tensor, Bucket] = {}
        self._name_of: dict[Tensor, str] = {}
        self._place: dict[Tensor, int] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._frozen = frozen
        self._done: set[Tensor] = set()
        self._next = 0
        self._sync = True
        self._used = torch.zeros(0)
        for entries in buckets:
            self._add_bucket(entries)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backwards in this context on this rank."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish(self) -> None:
        """Start the sums that have not started, wait for all, and leave the sums in `.grad`."""
        self._hook_thawed()
        unused = [p for p in self._bucket_of if p.grad is None]
        self._used.fill_(1.0)
        for parameter in unused:
            parameter.grad = torch.zeros_like(parameter)
            self._used[self._place[parameter]] = 0.0
        try:
            for bucket in self._buckets:
                if bucket.handle is None:
                    bucket.handle = self._start(bucket)
            used = self._start_flags(self._used)
            for bucket in self._buckets:
                self._end(bucket)
            self._end_flags(used)
        finally:
            self.reset()
        if any(p.requires_grad for p in unused):
            counts = self._used.tolist()  # waits for the device: only where a parameter took no part on this rank
            unused = [p for p in unused if counts[self._place[p]] == 0]
        for parameter in unused:
            parameter.grad = None

    def reset(self) -> None:
        """Forget what is under way in this step."""
        self._done.clear()
        self._next = 0
        for bucket in self._buckets:
            bucket.handle, bucket.waiting = None, len(bucket.entries)

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _hook_thawed(self) -> None:
        """Take in parameters that were frozen when the hooks were set and are trained now."""
        thawed = [(n, p) for n, p in self._frozen if p.requires_grad]
        if thawed:
            self._frozen = [(n, p) for n, p in self._frozen if not p.requires_grad]
            for named in thawed:
                self._add_bucket([named])

    def _add_bucket(self, entries: list[NamedParameter]) -> None:
        bucket = Bucket(len(self._buckets), entries)
        self._buckets.append(bucket)
        for name, parameter in entries:
            self._bucket_of[parameter], self._name_of[parameter] = bucket, name
            self._place[parameter] = len(self._place)
            hook = parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)
        device = entries[0][1].device
        self._used = torch.zeros(len(self._place), dtype=torch.float32, device=device)

    def _ready(self, parameter: Tensor) -> None:
        if not self._sync:
            return
        if parameter in self._done:
            name = self._name_of[parameter]
            raise TaskError(
                f"The gradient of '{name}' was computed twice in one synchronised backward (reentrant checkpointing, or "
                "a second backward in training_step). Use non-reentrant checkpointing, or add the losses and return them."
            )
        self._done.add(parameter)
        bucket = self._bucket_of[parameter]
        bucket.waiting -= 1
        if not self._in_order:
            if bucket.waiting == 0:
                bucket.handle = self._start(bucket)
            return
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            ready = self._buckets[self._next]
            ready.handle = self._start(ready)
            self._next += 1

    @abstractmethod
    def _start(self, bucket: Bucket) -> Any:
        """Start the sum of the bucket's gradients and return a handle that is not None."""

    @abstractmethod
    def _end(self, bucket: Bucket) -> None:
        """Wait for the bucket's sum and leave it in the parameters' `.grad`."""

    @abstractmethod
    def _start_flags(self, flags: Tensor) -> Any:
        """Start the sum of a small float32 vector, in place."""

    @abstractmethod
    def _end_flags(self, handle: Any) -> None:
        """Wait for the vector's sum."""


def split_frozen(named: Iterable[NamedParameter]) -> tuple[list[NamedParameter], list[NamedParameter]]:
    """Return (trained, frozen) parameters, each once, under clean names (no `_orig_mod.` of torch.compile)."""
    seen: set[Tensor] = set()
    trained: list[NamedParameter] = []
    frozen: list[NamedParameter] = []
    for name, parameter in named:
        if parameter not in seen:
            seen.add(parameter)
            (trained if parameter.requires_grad else frozen).append((name.replace("_orig_mod.", ""), parameter))
    return trained, frozen
