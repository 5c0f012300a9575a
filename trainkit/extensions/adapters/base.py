"""The frozen weights beside adapters: their fingerprint, and what else must stand still."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.callbacks.divergence_guard import hash_of

FINGERPRINT = "base_fingerprint"  # the Task's buffer, and so a weight of its checkpoints


def fingerprint_of(model: nn.Module) -> list[int]:
    """Return 32 bytes that follow from all weights and buffers of a model; waits for the device."""
    state = {
        name: value
        for name, value in sorted(model.state_dict().items())
        if isinstance(value, Tensor)
    }
    about = [f"{name} {value.dtype} {list(value.shape)}" for name, value in state.items()]
    sums = torch.stack([hash_of(value).cpu() for value in state.values()]).tolist() if state else []
    return list(hashlib.sha256(repr((about, sums)).encode()).digest())


def freeze_norms(model: nn.Module, trained: Iterable[nn.Module]) -> list[_BatchNorm]:
    """Let batch norms use their statistics, and not update them, but for trained ones; return
    them.
    """
    own = {*trained}
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m not in own]
    for norm in norms:
        norm.eval()
    return norms


def moving_buffers(model: nn.Module, frozen: Iterable[nn.Module]) -> set[str]:
    """Return the names of buffers that a step may change: all but those of frozen batch norms."""
    still = {buffer for norm in frozen for buffer in norm.buffers(recurse=False)}
    return {name for name, buffer in model.named_buffers() if buffer not in still}


class AdaptersAlone:
    """Lets a Task's state_dict hold these tensors alone, and its load_state_dict ask for no others.

    Args:
        task: gets two hooks.
        names: of the tensors.
        buffers: names of others that it holds, and need not get: checkpoints of earlier versions
            lack them.
    """

    def __init__(self, task: nn.Module, names: Iterable[str], buffers: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._held = self._names.union(buffers)
        self._hooks = (
            task.register_state_dict_post_hook(partial(self._leave_out)),  # type: ignore[no-untyped-call]
            task.register_load_state_dict_post_hook(partial(self._need_no_others)),  # type: ignore[no-untyped-call]
        )

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _leave_out(self, task: nn.Module, state: dict[str, Any], prefix: str, about: Any) -> None:
        for name in [key for key in state if key[len(prefix) :] not in self._held]:
            del state[name]

    def _need_no_others(self, task: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [
            key for key in incompatible.missing_keys if key in self._names
        ]
