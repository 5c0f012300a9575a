"""How tensors are sent: as flat views, each tensor of a model once,
an optimizer's state with its tensors beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from trainkit.device.transfer import to_device
from trainkit.engine.collectives import Collectives
from trainkit.optim.optimizer_state import load_state, state_of

_LARGE = 1024  # numbers of a tensor that is sent by itself


def dense_view(tensor: Tensor) -> Tensor | None:
    """Return a flat view of a tensor that fills its memory without gaps, or None if there is no
    such view.

    A channels_last weight is not contiguous, and Horovod refuses it; its flat view is, and costs no
    copy. Elements come in memory order, so the view is only good between ranks whose tensors have
    the same strides.
    """
    flat_stride = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if size != 1 and stride != flat_stride:
            return None
        flat_stride *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield each parameter and buffer of the model once."""
    seen: set[int] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor.detach()


def with_averages(
    buffers: Iterable[Tensor], averages: Mapping[Tensor, Tensor] | None
) -> list[Tensor]:
    """Return buffers, and the averages that there are of them."""
    own = list(buffers)
    return own + [averages[buffer] for buffer in own if averages and buffer in averages]


def overwrite(
    tensors: Iterable[Tensor], start: Callable[[int, Tensor], Callable[[], object]]
) -> None:
    """Overwrite tensors of any dtype and layout with another rank's, all under way at once.

    Args:
        start: starts the broadcast of a tensor's bytes, with its place among them; returns the
            function that waits for it.
    """
    sent: list[tuple[Callable[[], object], Tensor, Tensor]] = []
    for i, tensor in enumerate(tensors):
        flat = dense_view(tensor)
        held = tensor.contiguous().reshape(-1) if flat is None else flat
        sent.append((start(i, held.view(torch.uint8)), held, tensor))
    for wait, held, tensor in sent:
        wait()
        if held.data_ptr() != tensor.data_ptr():
            tensor.copy_(held.reshape(tensor.shape))


def send_optimizer_state(
    comm: Collectives, optimizers: Sequence[torch.optim.Optimizer], device: torch.device
) -> None:
    """Load rank 0's optimizer state on all ranks, if rank 0 has any.

    Horovod's own `broadcast_optimizer_state` takes a real step on a fresh optimizer (it moves the
    weights); this one sends the state that there is, and nothing if there is none.

    Args:
        device: of the engine.
    """
    if comm.ranks.world_size == 1:
        return
    held = comm.broadcast_object([bool(opt.state) for opt in optimizers])
    if not any(held):
        return
    own = [state_of(opt) for opt in optimizers] if comm.ranks.is_main else None
    states = _of_rank_0(comm, own, device)
    if not comm.ranks.is_main:
        for optimizer, state in zip(optimizers, states, strict=True):
            load_state(optimizer, state)


@dataclass(frozen=True)
class _Blank:
    """Stands for a tensor that is sent by itself."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


def _of_rank_0(comm: Collectives, value: Any, device: torch.device) -> Any:
    """Return rank 0's value on all ranks: large tensors of the device are sent as they are, which
    takes a tenth of the time; all else is pickled.

    By way of the host: unpickled on the others, a GPU's tensors would all land on rank 0's GPU.
    """
    large: list[Tensor] = []

    def outlined(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        is_large = leaf.numel() >= _LARGE and leaf.device.type == device.type
        if type(leaf) is not Tensor or not is_large or dense_view(leaf) is None:
            return to_device(leaf, torch.device("cpu"))
        large.append(leaf)
        return _Blank(leaf.shape, leaf.stride(), leaf.dtype)

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, _Blank):
            return leaf
        large.append(leaf.made(device))
        return large[-1]

    if comm.ranks.is_main:
        comm.broadcast_object(tree_map(outlined, value))
    else:
        value = tree_map(filled, comm.broadcast_object(None))
    comm.broadcast_tensors(large)
    return value
