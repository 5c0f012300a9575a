"""The hooks of a batch's way to the device:
on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainkit.api.datamodule import DataHooks
from trainkit.api.task import Task
from trainkit.device.transfer import Mover
from trainkit.run.data_sources import DataSources

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class HookedMover:
    """Moves batches as an owner of hooks wants it.

    Args:
        mover: moves what the owner does not.
        owner: a DataModule or Task that overrides a hook.
        device: the target.
        index: of the loader.
    """

    def __init__(
        self, mover: Mover, owner: DataHooks, device: torch.device, index: int = 0
    ) -> None:
        self._mover = mover
        self._owner = owner
        self._device = device
        self._index = index
        self._moves = _overrides(owner, "transfer_batch_to_device")

    def __call__(self, batch: Any) -> Any:
        """Return the batch for the Task."""
        owner, index = self._owner, self._index
        batch = owner.on_before_batch_transfer(batch, index)
        if self._moves:
            batch = owner.transfer_batch_to_device(batch, self._device, index)
        return owner.on_after_batch_transfer(self._mover(batch), index)

    def for_loader(self, index: int) -> HookedMover:
        """Return what moves the batches of the loader with this number."""
        return HookedMover(self._mover, self._owner, self._device, index)


def with_hooks(
    mover: Mover, data: DataSources, task: Task, device: torch.device
) -> Mover | HookedMover:
    """Return the mover with the hooks of the DataModule or the Task;
    itself if none is overridden.
    """
    for owner in reversed(data.owners(task)):
        if any(_overrides(owner, hook) for hook in _HOOKS):
            return HookedMover(mover, owner, device)
    return mover


def _overrides(owner: object, hook: str) -> bool:
    own: Callable[..., Any] | None = getattr(type(owner), hook, None)
    return own is not None and own is not getattr(DataHooks, hook)
