"""Checkpoints in pieces: written by several ranks side by side, read by any rank,
complete or absent.
"""

from __future__ import annotations

import json
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.checkpoints import small_disk, store_of
from trainkit.checkpoint import format as ckpt
from trainkit.checkpoint import parts
from trainkit.checkpoint.format import Snapshot
from trainkit.checkpoint.parts import RankFile, file_of
from trainkit.checkpoint.pieces import Pieces, resolve, split_tree
from trainkit.checkpoint.places import make_store
from trainkit.checkpoint.store import Store
from trainkit.engine.pieces import Piece, fill
from trainkit.errors import CheckpointError

WEIGHT = torch.arange(15.0).reshape(5, 3)


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store of each kind."""
    return (
        store_of(tmp_path)
        if request.param == "folder"
        else make_store(f"memory://{uuid.uuid4().hex}/checkpoints")
    )


def part(rank: int, token: int = 1 << 40) -> RankFile:
    """A part of two ranks: rows 0 to 2 of the weight, and rows 3 and 4; rank 0 has the bias."""
    rows = slice(0, 3) if rank == 0 else slice(3, 5)
    tensors = {"model/weight": WEIGHT[rows].clone(), "training/optimizers/0/m": WEIGHT[rows] * 2}
    at, size = [rows.start, 0], [rows.stop - rows.start, 3]
    boxes: dict[str, Any] = {key: ([5, 3], "float32", at, size) for key in tensors}
    if rank == 0:
        tensors["model/bias"] = torch.tensor([7.0])
        boxes["model/bias"] = ([1], "float32", [0], [1])
    return RankFile(rank, 2, token, tensors, boxes)


def snapshot_of(own: RankFile) -> Snapshot:
    """What rank 0 writes."""
    training = {"step": 3, "optimizers": [{"m": {"__piece__": "training/optimizers/0/m"}}]}
    return Snapshot({}, {"alias": "bias"}, training, {"epoch": 1}, own)


class Left(dict[str, bytes]):
    """What ranks leave for rank 0, as in the store of their group."""

    def take(self, key: str) -> bytes | None:
        """Return a message once."""
        return self.pop(key, None)

    def write_part(self, store: Store, name: str, own: RankFile) -> None:
        """Write a rank's part, and leave its report."""
        parts.report(own, store.write_part(name, own), self.__setitem__)


def write(store: Store, name: str = "one", token: int = 1 << 40) -> None:
    """Write a checkpoint by two threads, as two ranks do."""
    left = Left()
    other = threading.Thread(target=left.write_part, args=(store, name, part(1, token)))
    other.start()
    left.write_part(store, name, part(0, token))
    store.write(name, snapshot_of(part(0, token)), left.take)
    other.join()
    assert not left


def test_parts_become_one_checkpoint(store: Store) -> None:
    """Weights, aliases and the references of the rest are whole again,
    and nothing but the checkpoint's files is there.
    """
    write(store)
    assert store.names() == ["one"]
    with store.fetch("one") as folder:
        ckpt.verify(folder)
        state = ckpt.read_state(folder)
        assert (
            torch.equal(state["weight"], WEIGHT)
            and state["bias"].item() == 7 == state["alias"].item()
        )
        training = ckpt.load_training(folder)
        assert training["step"] == 3 and torch.equal(training["optimizers"][0]["m"], WEIGHT * 2)
        assert {path.name for path in folder.iterdir()} == {
            "manifest.json",
            "training.pt",
            file_of(0, 2),
            file_of(1, 2),
        }


def test_a_checkpoint_in_pieces_is_replaced(store: Store) -> None:
    """One of the same name is replaced, a whole one by pieces too."""
    write(store)
    write(store, token=(1 << 40) + 1)
    with store.fetch("one") as folder:
        assert torch.equal(ckpt.read_state(folder)["weight"], WEIGHT)


@pytest.mark.parametrize("at", [(0, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("size", [(1, 1), (2, 2), (5, 3)])
def test_any_box_is_filled(at: tuple[int, int], size: tuple[int, int], tmp_path: Path) -> None:
    """A rank of any other layout reads its own box, from the files that overlap it."""
    store = store_of(tmp_path)
    write(store)
    pieces = ckpt.open_pieces(store.folder / "one")
    assert pieces is not None
    box = tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))
    expected = WEIGHT[box]
    local = torch.full_like(expected, -1)
    fill(Piece(local, at, (5, 3), True), pieces.stored("model/weight"))
    assert torch.equal(local, expected)
    fill(Piece(local.zero_(), at, (5, 3), True), WEIGHT)
    assert torch.equal(local, expected)


def test_a_rank_that_cannot_write_is_named(tmp_path: Path) -> None:
    """Rank 1's disk is full: rank 0 says so, and neither a checkpoint nor a draft is left."""
    store = store_of(tmp_path)
    store.folder.mkdir(parents=True)
    big = part(1)._replace(tensors={"model/weight": torch.zeros(5000, 3)})
    with small_disk(5000), pytest.raises(OSError, match="safetensors") as caught:
        store.write_part("one", big)
    left = Left()
    parts.report(big, {"error": str(caught.value)}, left.__setitem__)
    left.write_part(store, "one", part(0))
    with pytest.raises(OSError, match=r"rank 1: .*rank-1-of-2\.safetensors"):
        store.write("one", snapshot_of(part(0)), left.take)
    assert store.names() == [] and list(store.folder.iterdir()) == [] and not left


def test_a_rank_that_cannot_write_leaves_the_checkpoint_that_it_would_have_replaced(
    store: Store,
) -> None:
    """The parts that other ranks have written replace none of it."""
    write(store)
    left = Left()
    for rank, report in ((0, None), (1, {"error": "no more quota"})):
        own = part(rank, (1 << 40) + 1)
        half = own._replace(tensors={key: one * 0 for key, one in own.tensors.items()})
        about = store.write_part("one", half)
        parts.report(own, report or about, left.__setitem__)
    with pytest.raises(OSError, match="rank 1: no more quota"):
        store.write("one", snapshot_of(part(0, (1 << 40) + 1)), left.take)
    with store.fetch("one") as folder:
        ckpt.verify(folder)
        assert torch.equal(ckpt.read_state(folder)["weight"], WEIGHT)


def test_all_reports_are_taken_if_one_is_a_failure(tmp_path: Path) -> None:
    """What stays in the group's store would pile up while a disk is full;
    rank 0 itself may be among those that failed.
    """
    store, left = store_of(tmp_path), Left()
    for rank in range(2):
        parts.report(part(rank), {"error": "Read-only file system"}, left.__setitem__)
    with pytest.raises(OSError, match=r"^rank 0: Read-only file system \(and 1 more of 2 ranks\)$"):
        store.write("one", snapshot_of(part(0)), left.take)
    assert not left and store.names() == []


def test_a_part_that_rank_0_does_not_see_is_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank with a disk of its own writes there: without its file there is no checkpoint."""
    monkeypatch.setattr(parts, "_SEEN_S", 0.0)
    left = Left()
    left.write_part(store, "one", part(0))
    left.write_part(store_of(tmp_path / "other"), "one", part(1))
    with pytest.raises(
        OSError,
        match=r"rank 1 has written rank-1-of-2\.safetensors .* storage that all hosts share",
    ):
        store.write("one", snapshot_of(part(0)), left.take)
    assert store.names() == []


def test_the_draft_of_an_earlier_checkpoint_is_removed(tmp_path: Path) -> None:
    """A rank wrote its part of a checkpoint after rank 0 had given it up:
    the next one removes it.
    """
    store = store_of(tmp_path)
    store.write_part("zero", part(1, (1 << 40) - 1))
    write(store)
    assert [path.name for path in store.folder.iterdir()] == ["one"]


@pytest.mark.parametrize("how", ["missing", "cut", "flipped"])
def test_a_damaged_part_is_named(how: str, tmp_path: Path) -> None:
    """A rank's file that is not what was written."""
    store = store_of(tmp_path)
    write(store)
    path = store.folder / "one" / file_of(1, 2)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(content if how == "flipped" else content[:-3])
    with pytest.raises(
        CheckpointError, match=r"rank-1-of-2\.safetensors is (missing|not what was written)"
    ):
        ckpt.verify(store.folder / "one")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [500, 3]}, "hold 15 of 1500 elements"),
        ({"shape": [5, -3]}, "are no sizes"),
        ({"shape": [5, True]}, "are no sizes"),
        ({"boxes": [["other.safetensors", [0, 0], [5, 3]]]}, "is none of its files"),
        ({"boxes": [["rank-0-of-2.safetensors", [0], [15]]]}, "other dimensions"),
        ({"boxes": [["rank-0-of-2.safetensors", [1, 0], [5, 3]]]}, "reaches beyond"),
        ({"boxes": 3}, "table of pieces is damaged"),
        ({"dtype": "object"}, "table of pieces is damaged"),
    ],
)
def test_a_table_that_is_none_is_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Nothing is allocated for what a manifest claims and no file holds."""
    store = store_of(tmp_path)
    write(store)
    manifest = json.loads((store.folder / "one" / "manifest.json").read_text())
    manifest["pieces"]["model/weight"] |= change
    with pytest.raises(CheckpointError, match=words):
        Pieces(store.folder / "one", manifest)


def test_references_stand_for_tensors_that_are_split() -> None:
    """Other tensors and values stay in the tree, which comes back as it was."""
    split, other = torch.ones(2), torch.zeros(1)
    tree = {"a": [{"b": split, "c": other}, (1, split)], "d": "x"}
    left, tensors = split_tree(tree, lambda key, value: value is split)
    assert sorted(tensors) == ["training/a/0/b", "training/a/1/1"]
    assert left["a"][0]["c"] is other and not isinstance(left["a"][0]["b"], Tensor)
    back = resolve(left, tensors.__getitem__)
    assert back == tree and isinstance(back["a"][1], tuple)


def test_a_file_of_whole_weights_is_read_in_boxes(tmp_path: Path) -> None:
    """A rank fills its part from weights.safetensors, under all names of a tensor."""
    model = nn.Linear(3, 5)
    store = store_of(tmp_path)
    store.write("one", Snapshot({"weight": model.weight.detach()}, {"tied": "weight"}, None, {}))
    pieces = Pieces.of_file(store.folder / "one" / "weights.safetensors")
    assert set(pieces.names()) == {"weight", "tied"}
    local = torch.zeros(2, 3)
    fill(Piece(local, (1, 0), (5, 3), True), pieces.stored("model/" + pieces.aliases["tied"]))
    assert torch.equal(local, model.weight[1:3])
