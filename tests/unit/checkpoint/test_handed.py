"""What hooks receive of a checkpoint: its weights are there however a hook looks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainkit.checkpoint.handed import Handed
from trainkit.errors import TaskError

STATE = {"step_in_epoch": 0, "current_epoch": 1, "global_step": 4}


@pytest.mark.parametrize(
    "look",
    [
        lambda handed: handed["state_dict"],
        lambda handed: handed.get("state_dict"),
        lambda handed: handed["state_dict"] if "state_dict" in handed else pytest.fail(),
        lambda handed: handed.setdefault("state_dict", handed.pop("state_dict")),
    ],
    ids=["item", "get", "in", "pop"],
)
def test_weights_are_there(look: Callable[[Handed], Any]) -> None:
    """They are read when a hook asks, and what it drops from them is gone."""
    handed = Handed({}, STATE, lambda: {"a": torch.zeros(1), "b": torch.ones(1)})
    del look(handed)["b"]
    own, weights = handed.split()
    assert own == {} and weights is not None and list(weights) == ["a"]


def test_weights_that_cannot_be_changed_are_not_there() -> None:
    """Nor is an entry that no hook has added."""
    handed = Handed({"mine": 1}, STATE)
    assert "state_dict" not in handed and handed.get("other", 2) == 2
    assert handed.pop("mine") == 1 and handed.pop("mine", None) is None
    assert handed.split() == ({}, None)


def test_a_weight_is_a_tensor() -> None:
    """The error says where other things belong."""
    handed = Handed({}, STATE, dict)
    handed["state_dict"]["version"] = 3
    with pytest.raises(TaskError, match=r"\['version'\] is of class int; it must be a tensor"):
        handed.split()
