"""How an optimizer's state comes to other ranks: bit for bit, whatever its tensors are like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.threads import World
from trainkit.engine import sending
from trainkit.engine.sending import send_optimizer_state

GAPS = 2048  # numbers of a tensor that is every other one of another


def model_of(seed: int) -> nn.Module:
    """Return a model with a channels_last convolution, and layers of many numbers and of few."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last), nn.Linear(64, 32)]  # type: ignore[call-overload]
    return nn.ModuleList([*layers, nn.Linear(2, 3).double()])


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """Return an Adam with state that has taken a step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    own = optimizer.state[next(model.parameters())]
    own["count"], own["with gaps"] = 3, torch.arange(2.0 * GAPS)[::2]
    return optimizer


def flat(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the leaves of an optimizer's state."""
    leaves, _ = torch.utils._pytree.tree_flatten(optimizer.state_dict())
    return list(leaves)


def test_all_ranks_get_the_state_of_rank_0(monkeypatch: Any) -> None:
    """Equal to the last bit, in the same layout of memory; large tensors are not pickled, and rank
    0's stay its own.
    """
    sent: list[int] = []
    monkeypatch.setattr(
        sending, "to_device", lambda tensor, _: sent.append(tensor.numel()) or tensor
    )

    def work(engine: Any) -> tuple[list[Any], int]:
        with engine:
            model = model_of(engine.place)
            optimizer = (
                trained(model) if engine.place == 0 else torch.optim.Adam(model.parameters())
            )
            before = [leaf.data_ptr() for leaf in flat(optimizer) if isinstance(leaf, Tensor)]
            send_optimizer_state(engine.comm, [optimizer], torch.device("cpu"))
            leaves = flat(optimizer)
            after = [leaf.data_ptr() for leaf in leaves if isinstance(leaf, Tensor)]
            return leaves, before == after

    (ours, is_same), (theirs, _) = World(2).run(work)
    assert is_same and len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(a, Tensor):
            assert a == b
            continue
        assert torch.equal(a, b) and a.dtype == b.dtype
        assert a.numel() == GAPS or a.stride() == b.stride()  # a memory without gaps is sent
    assert max(count for count in sent if count != GAPS) < 1024


def test_nothing_is_sent_without_state() -> None:
    """Fresh optimizers stay fresh; no step is taken on them."""

    def work(engine: Any) -> int:
        with engine:
            optimizer = torch.optim.Adam(model_of(engine.place).parameters())
            send_optimizer_state(engine.comm, [optimizer], torch.device("cpu"))
            return len(optimizer.state)

    assert World(2).run(work) == [0, 0]
