"""`data pack`: shards that WebDataset reads, written as a whole or continued."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from tests.helpers.pictures import write_pictures
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.data import command as data
from trainkit.extensions.shards.cache import ShardCache
from trainkit.extensions.shards.dataset import Sample, ShardDataset
from trainkit.extensions.shards.index import find_index
from trainkit.extensions.shards.packer import PACKING, pack, plan_of
from trainkit.extensions.shards.store import ShardStore


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Return a folder of 32 and 8 images."""
    return write_pictures(tmp_path / "images")


def contents(root: Path) -> dict[str, bytes]:
    """Return all files below a folder."""
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_every_image_is_in_one_shard(images: Path, tmp_path: Path) -> None:
    """With its own bytes, its class's number and its name;
    shards are of the size asked for, and mixed.
    """
    for packing in plan_of(images, str(tmp_path / "out"), 10_000):
        pack(packing, ShardStore())
    index = find_index(str(tmp_path / "out" / "train"), ShardStore())
    assert (
        index is not None
        and index.num_samples == 32
        and index.classes == tuple(f"class{i}" for i in range(4))
    )
    assert len(index.shards) > 3 and all(shard.classes > 1 for shard in index.shards[:-1])
    assert all(5_000 < shard.size < 25_000 for shard in index.shards[:-1])
    dataset = ShardDataset(index, ShardCache(tmp_path / "cache", 1, ShardStore()))
    found = {
        sample.describe().rpartition(": ")[2]: sample
        for sample in map(dataset.__getitem__, range(32))
    }
    for path in (images / "train").rglob("*.jpg"):
        sample: Sample = found[f"{path.parent.name}/{path.stem.replace('.', '_')}"]
        assert sample.files == {"jpg": path.read_bytes(), "cls": path.parent.name[-1].encode()}


# WebDataset leaves its tars to the garbage collector
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_reads_them(images: Path, tmp_path: Path) -> None:
    """The tars are WebDataset's own layout: pictures and numbers, each once."""
    wds = pytest.importorskip("webdataset")
    packing, _ = plan_of(images, str(tmp_path / "out"), 10_000)
    index = pack(packing, ShardStore())
    read = (
        wds.WebDataset([shard.url for shard in index.shards], shardshuffle=False)
        .decode("torchrgb")
        .to_tuple("jpg", "cls")
    )
    labels = [label for image, label in read if image.shape == (3, 24, 24)]
    assert sorted(labels) == sorted([*range(4)] * 8)
    del read
    gc.collect()


def test_an_interrupted_packing_continues(images: Path, tmp_path: Path) -> None:
    """What is complete is not written again; a place without its index is no data set;
    the end is the same, byte for byte.
    """
    whole, cut = (plan_of(images, str(tmp_path / name), 10_000)[0] for name in ("whole", "cut"))
    pack(whole, ShardStore())
    broken = whole.shards[2][0].path
    content = broken.read_bytes()
    broken.unlink()
    with pytest.raises(DataError, match=r"000002\.tar was not written: .*What is complete stays"):
        pack(cut, ShardStore(), workers=1)
    folder = tmp_path / "cut" / "train"
    assert find_index(str(folder), ShardStore()) is None
    assert sorted(json.loads((folder / PACKING).read_text())["done"]) == ["0", "1"]
    before = (folder / "000001.tar").stat().st_mtime_ns
    (folder / "000000.tar").write_bytes(b"cut off")
    broken.write_bytes(content)
    pack(cut, ShardStore())
    assert contents(folder) == contents(tmp_path / "whole" / "train")
    assert (folder / "000001.tar").stat().st_mtime_ns == before


def test_other_shards_are_not_mixed_with(images: Path, tmp_path: Path) -> None:
    """A place that is complete, holds another packing's part, or other tars, is refused."""
    (packing, other), store = plan_of(images, str(tmp_path / "out"), 10_000), ShardStore()
    pack(packing, store)
    with pytest.raises(ConfigError, match="holds shards already"):
        pack(packing, store)
    (tmp_path / "out" / "val").mkdir()
    (tmp_path / "out" / "val" / PACKING).write_text('{"digest": "another", "done": {}}')
    with pytest.raises(
        ConfigError, match="part of another packing: the images, shard_mb or seed differ"
    ):
        pack(other, store)
    (tmp_path / "out" / "val" / PACKING).unlink()
    (tmp_path / "out" / "val" / "9.tar").write_bytes(b"")
    with pytest.raises(ConfigError, match="holds 1 tar of another program"):
        pack(other, store)


def test_names_stay_apart(tmp_path: Path) -> None:
    """a.jpg and a.png, and x.1.jpg beside x_1.jpg, have keys of their own."""
    write_pictures(tmp_path, 4, 0, classes=1)
    folder = tmp_path / "train" / "class0"
    for name in ("a.jpg", "a.png", "x.1.jpg", "x_1.jpg"):
        (folder / name).write_bytes((folder / "image.000.jpg").read_bytes())
    (packing,) = plan_of(tmp_path, "out", 10**6)
    keys = [image.key for shard in packing.shards for image in shard]
    assert len({*keys}) == len(keys) == 8 and all("." not in key for key in keys)


def test_a_class_between_underscores_is_packed(tmp_path: Path) -> None:
    """Though files below such a name are about the tar."""
    write_pictures(tmp_path, 4, 0, classes=1)
    (tmp_path / "train" / "class0").rename(tmp_path / "train" / "__other__")
    (packing,) = plan_of(tmp_path / "train", str(tmp_path / "out"), 10**6)
    index = pack(packing, ShardStore())
    dataset = ShardDataset(index, ShardCache(tmp_path / "cache", 1, ShardStore()))
    assert index.classes == ("__other__",)
    assert [dataset[i].files["cls"] for i in range(4)] == [b"0"] * 4


def test_the_command_writes_both_parts(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And prints what it wrote, and the command that trains on it."""
    assert data.main("data", ["pack", str(images), f"output={tmp_path}/out", "shard_mb=0.01"]) == 0
    out = capsys.readouterr().out
    assert (
        "out/train: 32 images of 4 classes in" in out and "out/val: 8 images of 4 classes in" in out
    )
    assert "fit conf=resnet50 data=webdataset data.root=" in out and "data.num_classes=4" in out
    assert data.main("data", ["pack", str(images), f"output={tmp_path}/out"]) == 2


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        ([], 2, "The images are missing"),
        (["output=x"], 2, "The images are missing"),
        (["images"], 2, "output is missing"),
        (["images", "output=x", "shard_mb=0"], 2, "shard_mb is '0'; it must be a number above 0"),
        (["images", "output=x", "shard_mb=nan"], 2, "shard_mb is 'nan'"),
        (["images", "output=x", "workers=0"], 2, "workers is '0'"),
        (["images", "output=x", "shards=3"], 2, "'shards' is no setting of data pack"),
        (["images", "output=nothing://x"], 2, "'nothing://x/"),
        (["nowhere", "output=x"], 1, "nowhere is no folder"),
        (["empty", "output=x"], 1, "empty has no images in folders of classes"),
        (["uneven", "output=x"], 1, "train/ and val/ have other classes: b"),
    ],
)
def test_a_wrong_request_is_explained(
    typed: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By one sentence and the exit code; nothing is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_pictures(tmp_path / "images", 2, 2, classes=1)
    write_pictures(tmp_path / "uneven", 2, 2, classes=1)
    (tmp_path / "uneven" / "train" / "b").mkdir()
    assert data.main("data", ["pack", *typed]) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
