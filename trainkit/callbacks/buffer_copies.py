"""BufferCopies: a Task's buffers as a step found them, since its forward changes them (batch norm's statistics)."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


class BufferCopies:
    """Copies of the buffers that a checkpoint keeps, on their device; `update` takes a kernel or two and waits for nothing.

    Args:
        model: a module may put another tensor in a buffer's place.
    """

    def __init__(self, model: nn.Module) -> None:
        kept = model.state_dict()
        places = {f"{path}.{name}" if path else name: (m, name) for path, m in model.named_modules() for name in m._buffers}
        self._places = {name: place for name, place in places.items() if name in kept}
        self.copies: dict[str, Tensor] = {}
        self.update()

    def update(self) -> None:
        """Copy them as they are now."""
        pairs: defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for name, (module, own) in self._places.items():
            live, copy = module._buffers[own], self.copies.get(name)
            if live is None:
                self.copies.pop(name, None)
            elif copy is None or copy.shape != live.shape or copy.dtype != live.dtype:
                self.copies[name] = live.detach().clone()
            else:
                copies, lives = pairs[live.dtype]
                copies.append(copy)
                lives.append(live.detach())
        for copies, lives in pairs.values():  # of one dtype each: a mixed list would take a kernel for each tensor
            torch._foreach_copy_(copies, lives)
