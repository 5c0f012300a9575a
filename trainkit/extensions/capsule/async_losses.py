"""AsyncLosses: copies the loss of each step to the host without blocking a step."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from trainkit.device.accelerator import has_streams, mark, wide
from trainkit.device.sync_guard import allowed_read

_SLOTS = 256  # maximum lead of the host over the device, in steps


class AsyncLosses:
    """Adds up the loss of this rank's microbatches in a step, and returns it when it is available.

    On the CPU it is available at once. On a GPU it is copied to pinned memory after the step's own
    work and arrives some steps later; nothing waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = has_streams(device)
        self._sum: Tensor | None = None
        self._weight = 0
        self._attempt = 1
        self._pending: deque[tuple[int, int, torch.Event]] = deque()
        self._ready: deque[tuple[int, float]] = deque()
        self._slots = (
            torch.empty(_SLOTS, dtype=wide(device), pin_memory=True)
            if self._on_gpu
            else torch.empty(0)
        )
        self._next = 0

    def begin_step(self) -> None:
        """Reset the sum at a step's start."""
        self._sum = None
        self._weight = 0

    def add(self, loss: Tensor, num_samples: int, attempt: int = 1) -> None:
        """Add a microbatch's mean loss;
        if a step is repeated (another `attempt`), only the last attempt counts.
        """
        if attempt != self._attempt:
            self._attempt = attempt
            self.begin_step()
        part = loss.detach().to(wide(loss.device)) * num_samples
        self._sum = part if self._sum is None else self._sum + part
        self._weight += num_samples

    def end_step(self, step: int) -> None:
        """Start to copy the step's mean; a rank without samples has none."""
        if self._sum is None or self._weight == 0:
            return
        mean = self._sum / self._weight
        self.begin_step()
        if not self._on_gpu:
            with allowed_read():
                self._ready.append((step, float(mean)))
            return
        if len(self._pending) == _SLOTS:
            self._pending[0][2].synchronize()
            self._settle()
        slot = self._next
        self._slots[slot].copy_(mean, non_blocking=True)
        self._pending.append((step, slot, mark()))
        self._next = (slot + 1) % _SLOTS

    def ready(self) -> list[tuple[int, float]]:
        """Return (step, loss) of the losses that arrived since the last call, in order."""
        self._settle()
        came = list(self._ready)
        self._ready.clear()
        return came

    def drain(self) -> list[tuple[int, float]]:
        """Return all remaining losses. Waits for the device."""
        if self._pending:
            self._pending[-1][2].synchronize()
        return self.ready()

    def _settle(self) -> None:
        while self._pending and self._pending[0][2].query():
            step, slot, _ = self._pending.popleft()
            with allowed_read():
                self._ready.append((step, float(self._slots[slot])))
