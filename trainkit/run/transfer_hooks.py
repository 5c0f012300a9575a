"""The hooks of a batch's way to the device:
on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainkit.api.datamodule import DataHooks
from trainkit.api.task import Task
from trainkit.device.transfer import Mover
from trainkit.run.data_sources import DataSources

# of the classes whose hooks change nothing: ours, and those of a DataModule of Lightning's
_BASES = (DataHooks.__module__, "lightning.pytorch.core.hooks", "pytorch_lightning.core.hooks")
_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class HookedMover:
    """Moves batches as the owners of hooks want it.

    Args:
        mover: moves them, unless an owner does.
        owners: of each of the hooks: the DataModule or the Task.
        device: the target.
        index: of the loader.
    """

    def __init__(
        self, mover: Mover, owners: Sequence[DataHooks], device: torch.device, index: int = 0
    ) -> None:
        self._mover = mover
        self._owners = owners
        self._device = device
        self._index = index
        self._moves = _overrides(owners[1], _HOOKS[1])

    def __call__(self, batch: Any) -> Any:
        """Return the batch for the Task."""
        before, moves, after = self._owners
        batch = before.on_before_batch_transfer(batch, self._index)
        if self._moves:  # what it leaves where it is, stays there
            moved = moves.transfer_batch_to_device(batch, self._device, self._index)
            batch = self._mover.cast(moved)
        else:
            batch = self._mover(batch)
        return after.on_after_batch_transfer(batch, self._index)

    def for_loader(self, index: int) -> HookedMover:
        """Return what moves the batches of the loader with this number."""
        return HookedMover(self._mover, self._owners, self._device, index)


def with_hooks(
    mover: Mover, data: DataSources, task: Task, device: torch.device
) -> Mover | HookedMover:
    """Return the mover with the hooks, each that of the DataModule, or else the Task's; itself if
    none is overridden.
    """
    owners = [
        next((o for o in reversed(data.owners(task)) if _overrides(o, hook)), None)
        for hook in _HOOKS
    ]
    if not any(owners):
        return mover
    return HookedMover(mover, [owner or task for owner in owners], device)


def _overrides(owner: object, hook: str) -> bool:
    own: Callable[..., Any] | None = getattr(owner, hook, None)
    return own is not None and own.__module__ not in _BASES
