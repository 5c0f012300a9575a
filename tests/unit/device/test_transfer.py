"""Batches of any nesting: moved, cast, counted."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from tests.helpers.late_device import late_device
from trainkit.device.transfer import Mover, count_samples, each_tensor, may_go_beside, to_device
from trainkit.errors import TaskError

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "x y")


class Graph:
    """A batch with a `to` of its own, and a mapping's face."""

    def __init__(self) -> None:
        self.moved_to: object = None

    def to(self, device: torch.device) -> Graph:
        """Record the target."""
        self.moved_to = device
        return self


def test_nesting_is_kept() -> None:
    """Tuples, named tuples, lists and dicts keep their types;
    other values than tensors do not change.
    """
    batch = {
        "pair": Pair(torch.zeros(2), "name"),
        "list": [torch.zeros(2), 3],
        "tuple": (None, torch.zeros(2)),
    }
    moved = to_device(batch, CPU)
    assert type(moved["pair"]) is Pair
    assert moved["pair"].y == "name"
    assert moved["list"][1] == 3
    assert moved["tuple"][0] is None


@dataclass(frozen=True)
class Record:
    """A batch as a dataclass, with a field that is not set."""

    name: str
    x: torch.Tensor
    rest: dict[str, torch.Tensor] = field(default_factory=dict)
    later: torch.Tensor = field(init=False)


@pytest.mark.parametrize("kind", [OrderedDict, UserDict])
def test_a_mapping_stays_of_its_class(kind: Any) -> None:
    """A batch's attributes are preserved; the given batch does not change."""
    batch = kind({"x": torch.zeros(3)})
    batch.length = 3
    moved = to_device(batch, CPU, torch.float64)
    assert type(moved) is kind and moved.length == 3
    assert (batch["x"].dtype, moved["x"].dtype) == (torch.float32, torch.float64)


def test_a_dataclass_moves_field_by_field() -> None:
    """Also a frozen one, nested; its tensors are found, and its samples counted."""
    batch = Record("a", torch.zeros(3, 2), {"y": torch.ones(3)})
    moved = to_device(batch, CPU, torch.float64)
    assert type(moved) is Record and moved.name == "a"
    assert moved.x.dtype == moved.rest["y"].dtype == torch.float64
    assert batch.x.dtype == batch.rest["y"].dtype == torch.float32
    assert [tuple(tensor.shape) for tensor in each_tensor(batch)] == [(3, 2), (3,)]
    assert count_samples(batch) == 3


def test_only_floats_are_cast() -> None:
    """A true precision casts inputs of floating point, and leaves labels and masks unchanged."""
    x, label, mask = to_device(
        [torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.ones(2) > 0], CPU, torch.float64
    )
    assert (x.dtype, label.dtype, mask.dtype) == (torch.float64, torch.int64, torch.bool)


def test_channels_last_is_for_images() -> None:
    """Tensors of four dimensions take the memory format, others keep theirs."""
    image, row = to_device([torch.zeros(2, 3, 4, 5), torch.zeros(2, 3)], CPU, channels_last=True)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert row.is_contiguous()


def test_the_sequences_of_a_packed_sequence_are_counted() -> None:
    """Its data's first dimension is that of all steps in time."""
    assert count_samples((pack_sequence([torch.ones(3), torch.ones(2)]), torch.zeros(2))) == 2


def test_an_object_moves_itself() -> None:
    """A batch with its own `to(device)` is moved by it."""
    assert to_device(Graph(), CPU).moved_to == CPU


def test_an_object_whose_to_returns_nothing_has_moved_itself() -> None:
    """As chemprop's molecules, in a named tuple."""

    class InPlace(Graph):
        def to(self, device: torch.device) -> None:  # type: ignore[override]
            super().to(device)

    graph = InPlace()
    assert to_device(Pair(graph, None), CPU) == (graph, None)
    assert graph.moved_to == CPU


def test_a_packed_sequence_moves_itself() -> None:
    """A packed sequence, which is a named tuple, moves by its own `to`,
    which keeps its lengths on the CPU.
    """
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
    """A batch without a tensor, array or list is refused, with a remedy."""
    with pytest.raises(TaskError, match=r"batch of type dict .* no tensor.*collate_fn"):
        count_samples({"text": "a", "scale": torch.tensor(2.0)})


def test_what_is_there_is_handed_on() -> None:
    """On the CPU, without a cast or a layout, a batch is not rebuilt; otherwise it is."""
    batch = (torch.zeros(2, 3), torch.zeros(2))
    assert Mover(CPU)(batch) is batch
    assert Mover(CPU, torch.float64)(batch)[0].dtype == torch.float64
    assert Mover(torch.device("meta"))(batch)[0].device.type == "meta"
    images = Mover(CPU, channels_last=True)((torch.zeros(2, 3, 4, 5),))[0]
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_all_tensors_of_a_batch_are_found() -> None:
    """In containers of any nesting, and in objects that move themselves."""
    graph = Graph()
    graph.nodes, graph.edges = torch.zeros(1), [torch.zeros(2), "name"]  # type: ignore[attr-defined]
    packed = pack_sequence([torch.zeros(3)])
    found = each_tensor(
        {"a": (torch.zeros(4), [torch.zeros(5), 3]), "graph": graph, "packed": packed}
    )
    sizes = sorted(tensor.numel() for tensor in found)
    assert sizes == [1, 2, 3, 3, 4, 5]  # a packed sequence holds its batch sizes too


@pytest.mark.filterwarnings("ignore::UserWarning")  # that these kinds of tensors are in beta state
def test_what_torch_cannot_keep_for_another_stream_is_copied_on_the_current_one() -> None:
    """Dense tensors are copied beside computation; those without record_stream on a GPU are not."""
    dense = torch.eye(2)
    assert may_go_beside(dense)
    others = [dense.to_sparse(), dense.to_sparse_csr(), torch.nested.nested_tensor([dense, dense])]
    for tensor, key in zip(
        others, ("SparseCUDA", "SparseCsrCUDA", "NestedTensorCUDA"), strict=True
    ):
        assert not may_go_beside(tensor)
        assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::record_stream", key)


@pytest.mark.parametrize("seed", [None, *range(8)])
def test_a_batch_is_copied_beside_what_is_computed(seed: int | None) -> None:
    """The copy runs on a stream of its own; later work on the current stream sees it complete, and
    its memory is not given to the next batch before.
    """
    with late_device(seed) as device:
        move, total = Mover(device), torch.zeros(4, device=device)
        for step in range(8):
            batch = move((torch.full((4,), float(step)).pin_memory(), step))
            total += batch[0]
        assert (batch[0].device, batch[1]) == (device, 7)
        assert total.tolist() == [28.0] * 4


def test_a_batch_of_a_gpus_loader_is_not_waited_for() -> None:
    """Of pinned memory: nothing of the copy has run when the batch is returned."""
    with late_device() as device:
        moved = Mover(device)([torch.ones(3).pin_memory()])[0]
        assert moved.memory.isnan().all()
        torch.accelerator.synchronize()
        assert moved.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_handed_complete_batches() -> None:
    """The same on a real device."""
    numbers = torch.arange(2**24, dtype=torch.float32).pin_memory()
    moved = Mover(torch.device("cuda", 0))((numbers,))[0]
    assert float(moved.double().sum()) == float(numbers.double().sum())


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", {}), ("mps", {}), ("cuda", {"non_blocking": True})]
)
def test_an_objects_own_move_does_not_wait(device: str, expected: dict[str, bool]) -> None:
    """If its `to` can copy without a wait, as a tokenizer's batch can, it is asked to; on the CPU
    nothing is copied, and mps may read what has been overwritten.
    """
    asked: list[dict[str, bool]] = []

    class Batch(Graph):
        def to(self, device: torch.device, **options: bool) -> Batch:
            asked.append(options)
            return self

    class Asynchronous(Batch):
        def to(self, device: torch.device, *, non_blocking: bool = False) -> Batch:
            return super().to(device, **({"non_blocking": True} if non_blocking else {}))

    to_device(Asynchronous(), torch.device(device))
    to_device(Batch(), torch.device(device))
    assert asked == [expected, {}]


class Encoding(UserDict[str, torch.Tensor]):
    """A mapping that moves itself, as transformers' BatchEncoding."""

    def to(self, device: Any) -> Encoding:
        """Move in place."""
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


@dataclass
class Moving:
    """A dataclass that moves itself."""

    x: torch.Tensor

    def to(self, device: Any) -> Moving:
        """Return one there."""
        return Moving(self.x.to(device))


@pytest.mark.parametrize("by_hand", [False, True], ids=["moved here", "moved by the user"])
def test_what_moves_itself_is_cast(by_hand: bool) -> None:
    """Under 64-true and bf16-true, as in Lightning: floats alone, and the batch stays as it was."""
    mover = Mover(CPU, torch.float64)
    move = mover.cast if by_hand else mover
    numbers, tokens = (
        pack_sequence([torch.zeros(2, dtype=dtype)]) for dtype in (torch.float32, torch.int64)
    )
    packed, ids = move((numbers, tokens))
    assert (packed.data.dtype, ids.data.dtype) == (torch.float64, torch.int64)
    batch = Encoding(x=torch.zeros(2), ids=torch.zeros(2, dtype=torch.int64))
    cast = move(batch)
    assert type(cast) is Encoding and batch["x"].dtype == torch.float32
    assert (cast["x"].dtype, cast["ids"].dtype) == (torch.float64, torch.int64)
    assert move({"in": Moving(torch.zeros(2))})["in"].x.dtype == torch.float64


class Shared(MutableMapping[str, torch.Tensor]):
    """A mapping whose copies share their values, and that moves itself."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self.held = held

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.held[key]

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def to(self, device: Any) -> Shared:
        """Return itself."""
        return self


def test_a_mapping_of_its_own_kind_is_not_written_to() -> None:
    """A cached batch would have another dtype for good."""
    batch = Shared({"x": torch.zeros(2, dtype=torch.float64)})
    Mover(CPU, torch.bfloat16)(batch)
    assert batch["x"].dtype == torch.float64
