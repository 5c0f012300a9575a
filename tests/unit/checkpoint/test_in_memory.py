"""Memory: commits that are copied, and states that are held until they are needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainkit.checkpoint.in_memory import Memory
from trainkit.checkpoint.stateful import own_parts, pack, with_own_parts
from trainkit.engine.pieces import OwnPart, Piece

WIDE, NARROW = 200, 2  # of a layer whose weight is held, and of one whose is copied


def packed() -> list[bytes]:
    """Return the parts of one rank."""
    return [pack({"random": [1], "of_rank_0": {"callbacks": {}}})]


def take(memory: Memory, how: str, step: int, model: nn.Module, state: Any) -> None:
    """Hold or keep a state."""
    getattr(memory, how)(step, model.state_dict(), {"optimizers": state}, packed())


def values(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of a model's weights."""
    return [tensor.clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_a_state_that_is_held_becomes_the_commit(width: int) -> None:
    """If a rank is lost before the weights change, the step that is held is continued from."""
    memory, model, moment = Memory(), nn.Linear(width, width), torch.ones(width, width)
    take(memory, "keep", 3, model, {"moment": moment})
    with torch.no_grad():
        model.weight.add_(1)
    expected = values(model)
    take(memory, "hold", 4, model, {"moment": moment})
    assert memory.step == 3
    memory.settle(4)
    assert memory.step == 4
    with torch.no_grad():
        model.weight.zero_()
    state = memory.load_into(model)
    assert all(map(torch.equal, values(model), expected))
    assert torch.equal(state["optimizers"]["moment"], moment) and state["random"] == [[1]]


def test_a_state_whose_weights_have_changed_is_dropped() -> None:
    """The commit before is continued from: what is held is not the state of its step any more."""
    memory, model = Memory(), nn.Linear(WIDE, WIDE)
    take(memory, "keep", 3, model, {})
    take(memory, "hold", 4, model, {})
    with torch.no_grad():
        model.weight.add_(1)
    assert not memory.can_settle
    memory.settle(4)
    assert memory.step == 3


@pytest.mark.parametrize("now", [5, 3])
def test_a_state_of_another_step_is_dropped(now: int) -> None:
    """An update has been taken since it was held."""
    memory, model = Memory(), nn.Linear(WIDE, WIDE)
    take(memory, "keep", 3, model, {})
    take(memory, "hold", 4, model, {})
    memory.settle(now)
    assert memory.step == 3
    memory.settle(4)
    assert memory.step == 3, "it is dropped for good"


def test_small_tensors_are_copied() -> None:
    """A buffer that the next forward changes does not keep a state from being used."""
    memory, model = Memory(), nn.BatchNorm1d(NARROW)
    take(memory, "hold", 4, model, {})
    before = values(model)
    model(torch.randn(5, NARROW))
    memory.settle(4)
    memory.load_into(model)
    assert all(map(torch.equal, values(model), before))


def test_a_part_fills_only_what_has_its_shape() -> None:
    """What a rank holds of a tensor is put back where it was; the whole tensor cannot be read."""
    part = OwnPart(torch.arange(3.0), (6,))
    piece = Piece(torch.zeros(3), (3,), (6,), True)
    part.into(piece)
    assert torch.equal(piece.local, torch.arange(3.0))
    with pytest.raises(ValueError, match=r"shape \[6\], of which each rank holds a part"):
        part.whole()


def test_parts_are_read_from_where_they_were() -> None:
    """A tree of plain values and whole tensors stays as it is, and parts come back readable."""
    tree = {"a": [1, torch.ones(2)], "b": ("x", {"c": None})}
    back = with_own_parts(own_parts(tree))
    assert back["b"] == tree["b"] and torch.equal(back["a"][1], torch.ones(2))
    one = with_own_parts({"a": [{"__own_part__": torch.ones(2), "shape": [4]}]})["a"][0]
    assert isinstance(one, OwnPart) and one.shape == (4,)
