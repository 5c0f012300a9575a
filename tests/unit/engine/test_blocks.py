"""Blocks of a model: those that repeat, and those that are named."""

from __future__ import annotations

import pytest
from torch import nn

from trainkit.engine.blocks import blocks_of, repeated_blocks
from trainkit.errors import ConfigError
from trainkit.extensions.fsdp.units import without_shared


class Block(nn.Module):
    """A layer and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.LayerNorm(2)


class Deep(nn.Module):
    """Layers before, in and after a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(2, 2)


def test_blocks_that_repeat_are_found() -> None:
    """Modules of one class with layers of their own; single layers are too small."""
    model = Deep()
    assert list(repeated_blocks(model)) == list(model.blocks)


@pytest.mark.parametrize(
    ("names", "count"), [(["Block"], 2), (["blocks.1"], 1), (["Linear", "blocks.0"], 6)]
)
def test_blocks_are_named_by_place_or_class(names: list[str], count: int) -> None:
    """Inner modules come before those that hold them."""
    model = Deep()
    found = blocks_of(model, names, "engine.shard")
    assert len(found) == count
    if "blocks.0" in names:
        assert found.index(model.blocks[0]) > found.index(model.blocks[0].layer)


def test_an_unknown_name_is_an_error() -> None:
    """The message names the setting, the value, and the classes that there are."""
    with pytest.raises(
        ConfigError,
        match=(
            r"engine\.shard names 'Blocks', which is no module of Deep.*Linear \(5\), .*Block \(2\)"
        ),
    ):
        blocks_of(Deep(), ["Blocks"], "engine.shard")


def test_a_block_that_shares_a_weight_outside_is_left_out() -> None:
    """A weight that two units would gather belongs to neither."""
    model = Deep()
    model.last.weight = model.blocks[0].layer.weight
    assert without_shared(model, list(model.blocks)) == [model.blocks[1]]


def test_a_block_of_two_lists_is_yielded_once() -> None:
    """As a U-Net's, whose blocks are also in one list of all."""
    model = Deep()
    model.all = nn.ModuleList([*model.blocks, Block()])
    assert list(repeated_blocks(model)) == list(model.all)
