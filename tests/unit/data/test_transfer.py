"""Batches of any nesting: moved, cast, counted."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainkit.data.transfer import count_samples, to_device
from trainkit.errors import TaskError

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "x y")


class Graph:
    """A batch with a `to` of its own, and a mapping's face."""

    def __init__(self) -> None:
        self.moved_to: object = None

    def to(self, device: torch.device) -> Graph:
        """Remember where to."""
        self.moved_to = device
        return self


def test_nesting_is_kept() -> None:
    """Tuples, named tuples, lists and dicts come back as what they were; what is no tensor is left alone."""
    batch = {"pair": Pair(torch.zeros(2), "name"), "list": [torch.zeros(2), 3], "tuple": (None, torch.zeros(2))}
    moved = to_device(batch, CPU)
    assert type(moved["pair"]) is Pair
    assert moved["pair"].y == "name"
    assert moved["list"][1] == 3
    assert moved["tuple"][0] is None


def test_only_floats_are_cast() -> None:
    """A true precision casts inputs of floating point, and leaves labels and masks alone."""
    x, label, mask = to_device([torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.ones(2) > 0], CPU, torch.float64)
    assert (x.dtype, label.dtype, mask.dtype) == (torch.float64, torch.int64, torch.bool)


def test_channels_last_is_for_images() -> None:
    """Tensors of four dimensions take the memory format, others keep theirs."""
    image, row = to_device([torch.zeros(2, 3, 4, 5), torch.zeros(2, 3)], CPU, channels_last=True)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert row.is_contiguous()


def test_an_object_moves_itself() -> None:
    """A batch with its own `to(device)` is asked to move itself."""
    assert to_device(Graph(), CPU).moved_to == CPU


def test_a_packed_sequence_moves_itself() -> None:
    """A packed sequence, which is a named tuple, moves by its own `to`, which keeps its lengths on the CPU."""
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device(packed, torch.device("meta"))
    assert isinstance(moved, PackedSequence)
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(5, 3),
        (torch.zeros(5, 3), torch.zeros(5)),
        {"text": ["a", "b"], "scale": torch.tensor(2.0), "x": torch.zeros(5, 2)},
        OrderedDict(inner=[Pair(torch.zeros(5), torch.zeros(7))]),
    ],
)
def test_samples_are_counted_by_the_first_tensor(batch: object) -> None:
    """The number of samples is the length of the first tensor that has one."""
    assert count_samples(batch) == 5


def test_a_batch_without_tensors_cannot_be_counted() -> None:
    """A batch without a tensor is refused, with what to do about it."""
    with pytest.raises(TaskError, match=r"batch of type dict .* no tensor.*num_samples"):
        count_samples({"text": ["a", "b"], "scale": torch.tensor(2.0)})
