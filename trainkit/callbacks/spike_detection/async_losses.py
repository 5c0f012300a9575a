"""LateLosses: the loss of each step on the host, without a step that waits for it."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from trainkit.device.sync_guard import allowed_read

_SLOTS = 256  # steps that the host may be ahead of the device


class LateLosses:
    """Adds up the loss of this rank's microbatches of a step, and hands it over when it is there.

    On the CPU that is at once. On a GPU the value is copied to pinned memory behind the step's own work, and is there some
    steps later; nobody waits for it.

    Args:
        device: where the losses are.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._sum: Tensor | None = None
        self._weight, self._attempt = 0, 1
        self._pending: deque[tuple[int, int, torch.cuda.Event]] = deque()
        self._ready: deque[tuple[int, float]] = deque()
        self._slots = torch.empty(_SLOTS, dtype=torch.float64, pin_memory=True) if self._on_gpu else torch.empty(0)
        self._next = 0

    def begin_step(self) -> None:
        """Forget what was added: a step begins."""
        self._sum, self._weight = None, 0

    def add(self, loss: Tensor, num_samples: int, attempt: int = 1) -> None:
        """Take a microbatch's mean loss; of a step that is taken anew (another `attempt`) only the last attempt counts."""
        if attempt != self._attempt:
            self._attempt = attempt
            self.begin_step()
        part = loss.detach().double() * num_samples
        self._sum = part if self._sum is None else self._sum + part
        self._weight += num_samples

    def end_step(self, step: int) -> None:
        """Send the step's mean on its way; a rank without samples has none."""
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
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append((step, slot, event))
        self._next = (slot + 1) % _SLOTS

    def ready(self) -> list[tuple[int, float]]:
        """Return (step, loss) of the steps whose loss has come since the last call, in order."""
        self._settle()
        came = list(self._ready)
        self._ready.clear()
        return came

    def drain(self) -> list[tuple[int, float]]:
        """Return all that is left. Waits for the device."""
        if self._pending:
            self._pending[-1][2].synchronize()
        return self.ready()

    def _settle(self) -> None:
        while self._pending and self._pending[0][2].query():  # type: ignore[no-untyped-call]
            step, slot, _ = self._pending.popleft()
            with allowed_read():
                self._ready.append((step, float(self._slots[slot])))
