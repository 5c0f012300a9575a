"""Batches of any nesting survive a file that runs no code when it is read."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainkit.errors import CheckpointError
from trainkit.extensions.capsule.batches import pack, tensors_in, unpack


class Pair(NamedTuple):
    """A batch with names."""

    x: Any
    y: Any


def through_a_file(batch: Any) -> Any:
    """Return the batch after writing and reading without running code."""
    file = io.BytesIO()
    torch.save(pack(batch), file)
    file.seek(0)
    return unpack(torch.load(file, weights_only=True))


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_structure_and_bits_are_kept() -> None:
    """Tuples, lists, mappings, plain values and each tensor's dtype are restored."""
    batch = (
        torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        {"ids": torch.arange(3), 4: [torch.ones(2, 2).to_sparse(), None, "text", 2.5, True]},
        [],
    )
    back = through_a_file(batch)
    assert type(back) is tuple and type(back[1][4]) is list
    assert back[0].dtype == torch.bfloat16
    assert torch.equal(back[0].view(torch.int16), batch[0].view(torch.int16))
    assert torch.equal(back[1]["ids"], torch.arange(3))
    assert back[1][4][0].is_sparse and back[1][4][1:] == [None, "text", 2.5, True]
    assert back[2] == []


def test_named_tuples_arrays_and_packed_sequences_are_kept() -> None:
    """Fields keep their names, an array is an array, a packed sequence is one."""
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    back = through_a_file(Pair(np.array([1, 2], dtype=np.int32), packed))
    assert back._fields == ("x", "y")
    assert back.x.dtype == np.int32 and back.x.tolist() == [1, 2]
    assert isinstance(back.y, PackedSequence) and torch.equal(back.y.data, packed.data)


def test_it_is_a_copy() -> None:
    """Later changes of the batch do not change the copy."""
    x = torch.ones(2)
    packed = pack([x])
    x.zero_()
    assert unpack(packed)[0].tolist() == [1, 1]


def test_another_object_is_named_by_its_place() -> None:
    """An object that cannot be saved raises when it is read, not when it is written."""
    packed = pack({"x": [torch.ones(1), object()]})
    with pytest.raises(
        CheckpointError,
        match=r"batch\['x'\]\[1\] was a builtins\.object, which a capsule cannot save",
    ):
        unpack(packed)


def test_tensors_are_found_by_place() -> None:
    """Each tensor is named by its place."""
    found = tensors_in((torch.ones(1), {"a": [torch.zeros(2), "text"]}))
    assert [place for place, _ in found] == ["batch[0]", "batch[1]['a'][0]"]
