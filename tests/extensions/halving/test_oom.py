"""Out of memory: microbatches are split, the step's samples and the result stay the same."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from tests.helpers.toy import Line, loader, quiet, rows, weights
from trainkit.device.transfer import Mover
from trainkit.engine.single import SingleEngine
from trainkit.errors import TrainkitError
from trainkit.extensions.halving.oom import split


class Small(Line):
    """Holds `room` samples; more are out of memory, before or after the forward was logged."""

    def __init__(self, room: int, **sgd: Any) -> None:
        super().__init__(**sgd)
        self.room, self.sizes = room, []
        self.indices: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log, and fail if the batch is too large."""
        self.sizes.append(len(batch[0]))
        self.indices.append(batch_idx)
        self.log("seen", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        loss = super().training_step(batch, batch_idx)
        if len(batch[0]) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return loss


@pytest.mark.parametrize(("room", "pieces"), [(3, 2), (2, 2), (1, 4)])
def test_the_step_is_retried_in_pieces(
    tmp_path: Path, room: int, pieces: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, logged values and counts are those of a run with enough memory;
    the split is reported, and stays.
    """
    settings = {
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "precision": "64-true",
        "gradient_clip_val": 1.0,
    }
    roomy, tight = Small(99, momentum=0.9), Small(room, momentum=0.9)
    runs = [quiet(tmp_path, halve_batch_on_oom=True, **settings) for _ in range(2)]
    plain = quiet(tmp_path, **settings)
    plain_task = Small(99, momentum=0.9)
    plain.fit(plain_task, loader(23))
    for run, task in zip(runs, (roomy, tight), strict=True):
        run.fit(task, loader(23))
        torch.testing.assert_close(weights(task), weights(plain_task), rtol=0, atol=1e-12)
        assert run.callback_metrics["seen"] == 23.0
        assert run.state.samples_seen == plain.state.samples_seen == 46
    said = capsys.readouterr().out
    assert said.count("Out of memory on rank 0") == {2: 1, 4: 2}[pieces]
    assert f"into {pieces} pieces" in said
    assert f"data.batch_size={4 // pieces} would avoid it" in said
    assert max(tight.sizes[-6:]) <= room
    assert roomy.sizes == plain_task.sizes
    assert set(tight.indices) == set(plain_task.indices)


def test_one_sample_must_fit(tmp_path: Path) -> None:
    """If a single sample is too large, the run ends with the error."""
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2 GiB"):
        quiet(tmp_path, halve_batch_on_oom=True).fit(Small(0), loader(8))


def test_not_asked_for(tmp_path: Path) -> None:
    """Without the setting the error is the user's."""
    with pytest.raises(torch.OutOfMemoryError):
        quiet(tmp_path).fit(Small(1), loader(8))


class Pair(NamedTuple):
    """A batch with names."""

    x: torch.Tensor
    text: list[str]


def test_batches_of_any_nesting_are_split() -> None:
    """Tensors and lists of the samples are split; other values go to each part."""
    batch = {
        "pair": Pair(torch.arange(5), list("abcde")),
        "scale": torch.tensor(2.0),
        "k": 3,
        "both": [torch.arange(5)] * 2,
    }
    first, second = split(batch, 5, 2)
    assert first["pair"].x.tolist() == [0, 1, 2]
    assert (first["pair"].text, second["pair"].text) == (["a", "b", "c"], ["d", "e"])
    assert second["both"][1].tolist() == [3, 4]
    assert (first["scale"], second["k"]) == (torch.tensor(2.0), 3)
    assert [p["k"] for p in split(batch, 5, 8)] == [3] * 5


def images(count: int, channels: int = 3) -> list[torch.Tensor]:
    """Return images of a number of channels, each of its own value."""
    return [torch.full((channels, 2, 2), float(i)) for i in range(count)]


def targets(count: int) -> list[dict[str, torch.Tensor]]:
    """Return boxes for each image."""
    return [{"boxes": torch.full((i, 4), float(i))} for i in range(1, count + 1)]


@dataclass(frozen=True)
class Record:
    """A batch of one's own."""

    x: torch.Tensor
    names: list[str]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", [list, tuple])
def test_images_stay_with_their_targets(count: int, kind: Any) -> None:
    """Lists of an entry for each sample, as torchvision's detection has them, and samples that were
    not collated.
    """
    first = -(-count // 2)
    # as many images as an image has channels: see the next test
    channels = 3 if count != 3 else 1
    pictures, boxes = images(count, channels), targets(count)
    for i, (x, y) in enumerate(split((kind(pictures), kind(boxes)), count, 2)):
        part = slice(i * first, (i + 1) * first)
        assert [id(item) for item in x] == [id(item) for item in pictures[part]]
        assert [id(item) for item in y] == [id(item) for item in boxes[part]]
    samples = list(zip(pictures, boxes, strict=True))
    assert [len(piece) for piece in split(samples, count, 2)] == [first, count - first]
    missing = [None, *pictures[1:]]
    assert split({"x": missing}, count, 2)[0]["x"][0] is None
    assert len(split({"x": missing}, count, 2)[0]["x"]) == first


@pytest.mark.parametrize(
    "batch",
    [
        (images(3), targets(3)),
        {"views": [torch.zeros(3, 2)] * 3, "y": torch.zeros(3)},
        [[torch.zeros(1)] * 3] * 3,
        (pack_sequence([torch.zeros(2)] * 3), torch.zeros(3)),
    ],
    ids=["images of 3 channels", "3 views", "3 lists of 3", "packed"],
)
def test_what_may_be_split_in_two_ways_is_left_whole(batch: Any) -> None:
    """An entry of such a list may be one sample, or a part of all: halves would be other samples."""
    pieces = split(batch, 3, 2)
    assert len(pieces) == 1 and pieces[0] is batch


def test_parts_of_all_samples_are_split_along_samples() -> None:
    """As many tensors as samples: a TensorDataset's, and those of several types."""
    for one, other in ((torch.zeros(2, 1), torch.ones(2, 1)), (torch.zeros(2, 3), torch.ones(2))):
        pieces = split([one, other], 2, 2)
        assert [[len(part) for part in piece] for piece in pieces] == [[1, 1], [1, 1]]
    x, y = split({"a": [torch.zeros(2, 3), torch.ones(2)]}, 2, 2)[0]["a"]
    assert (len(x), len(y)) == (1, 1)
    *parts, name = split([torch.zeros(4), torch.zeros(4), torch.zeros(()), "name"], 4, 2)[0]
    assert [part.numel() for part in parts] == [2, 2, 1] and name == "name"


def test_a_dataclass_is_split() -> None:
    """Its fields are, and the batch stays as it was."""
    batch = Record(torch.arange(3), ["a", "b", "c"])
    first, second = split(batch, 3, 2)
    assert (first.x.tolist(), first.names) == ([0, 1], ["a", "b"])
    assert (second.x.tolist(), second.names) == ([2], ["c"])
    assert len(batch.x) == 3


def test_a_batch_that_cannot_be_split_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step is taken with it whole, so it does not fit; a line says why."""

    class Views(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch["views"][0], batch["y"]), batch_idx)

    data = [{"views": [torch.zeros(3)] * 4, "y": torch.zeros(1)}] * 4
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2 GiB"):
        quiet(tmp_path, halve_batch_on_oom=True).fit(Views(2), DataLoader(data, batch_size=4))
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("A batch of 4 samples is not split") == 1
    assert "as one tensor" in said


class Batch(UserDict[str, torch.Tensor]):
    """A mapping with attributes, as tokenizers give."""

    def to(self, device: Any) -> Batch:
        """Stay."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


@pytest.mark.parametrize("room", [4, 1])
def test_a_batchs_class_survives_a_split(tmp_path: Path, room: int) -> None:
    """A batch of a class of its own stays one, split or not; places follow the pieces."""
    sizes: list[int] = []

    class Takes(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            sizes.append(len(batch.x))
            if len(batch.x) > room:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return functional.mse_loss(self(batch.x), batch.y)

    def collate(samples: Any) -> Batch:
        x, y = torch.utils.data.default_collate(samples)
        return Batch(x=x, y=y)

    quiet(tmp_path, halve_batch_on_oom=True).fit(Takes(), loader(8, collate_fn=collate))
    assert sizes[-1] == room


def test_a_piece_knows_its_samples(tmp_path: Path) -> None:
    """After a split, a loss that is not finite is reported with the samples of its piece."""

    class Bad(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            loss = super().training_step(batch, batch_idx)
            return (
                loss * float("nan") if rows(8).tensors[0][6].tolist() in batch[0].tolist() else loss
            )

    with pytest.raises(TrainkitError, match=r"nan on rank 0, samples 6, 7 of the data set"):
        quiet(tmp_path, halve_batch_on_oom=True, stop_on_nonfinite=True).fit(Bad(), loader(8))


def test_the_sums_may_be_what_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is shortest where gradients are copied for the sums: a rank that fails there takes
    part with zeros, and all take the step again.
    """
    plain, tight = Small(99), Small(99)
    quiet(tmp_path).fit(plain, loader(8))
    events: list[str] = []
    sums = SingleEngine.reduce_gradients

    def reduce_gradients(engine: SingleEngine, gives_up: bool = False) -> None:
        events.append("give up" if gives_up else "sum")
        if len(events) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        sums(engine)

    monkeypatch.setattr(SingleEngine, "reduce_gradients", reduce_gradients)
    quiet(tmp_path, halve_batch_on_oom=True).fit(tight, loader(8))
    torch.testing.assert_close(weights(tight), weights(plain))
    assert events == ["sum", "sum", "give up", "sum"]
    assert tight.sizes == [4, 4, 2, 2]


@pytest.mark.parametrize("hooked", [False, True])
def test_the_move_to_the_device_may_be_what_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hooked: bool
) -> None:
    """Microbatches of a step are moved one at a time, and a failure there is one of the attempt;
    a hook that moves them is called once for each.
    """
    moves: list[int] = []
    real = Mover.__call__

    def move(mover: Mover, batch: Any) -> Any:
        moves.append(len(batch[0]))
        if len(moves) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        return real(mover, batch)

    class Hooked(Small):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            hooks.append(len(batch[0]))
            return batch

    hooks: list[int] = []
    monkeypatch.setattr(Mover, "__call__", move)
    task = (Hooked if hooked else Small)(99)
    quiet(tmp_path, halve_batch_on_oom=True, accumulate_grad_batches=2).fit(task, loader(8))
    assert moves == ([4, 4, 4] if hooked else [4, 4, 4, 4])
    assert hooks == ([4, 4] if hooked else [])
    assert task.sizes == [4, 2, 2, 2, 2]


def test_empty_entries_beside_samples_are_split() -> None:
    """An empty dict is an entry of one sample, as any other is."""
    pieces = split({"x": torch.zeros(2, 3), "meta": [{}, {}]}, 2, 2)
    assert [len(piece["meta"]) for piece in pieces] == [1, 1]
