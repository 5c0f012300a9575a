"""recipes/image_shards.py: images of shards become batches; what cannot be used is named."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.augment import Augment
from recipes.image_shards import ImageShards, RepeatedShards
from tests.helpers.pictures import write_pictures
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.data import command as data
from trainkit.extensions.shards.index import Index, Shard
from trainkit.extensions.shards.order import ShardOrder
from trainkit.extensions.shards.packer import pack, plan_of
from trainkit.extensions.shards.store import ShardStore


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of shards of 32 and 8 images, of 4 classes."""
    folder = tmp_path_factory.mktemp("packed")
    images = write_pictures(folder / "images")
    for packing in plan_of(images, str(folder / "shards"), 10_000):
        pack(packing, ShardStore())
    return folder / "shards"


def shards(root: Path | None = None, **options: Any) -> ImageShards:
    """Return the data module, for small images without workers."""
    own = {
        "batch_size": 4,
        "num_classes": 4,
        "image_size": 16,
        "num_workers": 0,
        "shuffle_shards": 2,
    }
    return ImageShards(None if root is None else str(root), **{**own, **options})


def ready(made: ImageShards, stage: str = "fit") -> ImageShards:
    """Return it prepared and set up."""
    made.prepare_data()
    made.setup(stage)
    return made


def test_batches_are_normalised_crops(packed: Path) -> None:
    """A batch is float32 [B, 3, size, size] with its labels, in training and in validation."""
    made = ready(shards(packed))
    for loader, count in ((made.train_dataloader(), 32), (made.val_dataloader(), 8)):
        batches = list(loader)
        assert sum(len(labels) for _, labels in batches) == count
        images, labels = batches[0]
        assert (images.shape, images.dtype, labels.dtype) == (
            (4, 3, 16, 16),
            torch.float32,
            torch.int64,
        )
        assert images.abs().max() < 3
    assert made.describe_input()["classes"] == [f"class{i}" for i in range(4)]


def test_the_shuffle_is_described(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, when the training data is made."""
    ready(shards(packed)).train_dataloader()
    assert "data     shuffle: 2 of " in capsys.readouterr().out


def test_tars_by_name_need_no_index(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is made once, and kept in the cache's folder."""
    for part in ("train", "val"):
        shutil.copytree(packed / part, tmp_path / part, ignore=shutil.ignore_patterns("index.json"))
    options: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "num_classes": 4}
    made = ready(shards(urls=f"{tmp_path}/train/*.tar", **options))
    assert capsys.readouterr().out.count("has no index.json") == 1
    assert len(made.train) == 32 and made.val_dataloader() is None
    again = ready(shards(tmp_path, **options))
    assert len(again.train) == 32 and len(again.val) == 8
    assert capsys.readouterr().out.count("are read once to make it") == 1  # of val/


def test_another_order_on_resuming_is_said(
    packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the same one is not."""
    state = ready(shards(packed)).state_dict()
    ready(shards(packed)).load_state_dict(state)
    assert "another order" not in capsys.readouterr().out
    ready(shards(packed, shuffle_shards=3, lanes=2)).load_state_dict(state)
    said = capsys.readouterr().out
    assert (
        "another order: shuffle_shards=2 (now 3), lanes=1 (now 2), batch_size=any (now 4)" in said
    )


def test_copies_of_a_sample_come_in_one_step() -> None:
    """With 3 copies and 12 samples a step: 4 samples, each as three indices;
    the last step is short.
    """
    index = Index(tuple(Shard(f"{i}", 10, 1) for i in range(5)))
    order = RepeatedShards(ShardOrder(index, 2), 3, 12).order_of(0, 0)
    assert len(order) == 50
    base = ShardOrder(index, 2).order_of(0, 0)
    for step in range(4):
        places = order[12 * step : 12 * step + 12]
        assert sorted(places) == sorted(
            50 * copy + base[4 * step + i] for copy in range(3) for i in range(4)
        )
    assert [i % 50 for i in order[48:50]] == [base[16], base[16]]


def test_repeats_are_copies_augmented_for_themselves(packed: Path) -> None:
    """Of one image in one batch; an epoch has as many samples as without."""
    made = ready(shards(packed, augment=Augment(repeats=2)))
    batches = list(made.train_dataloader())
    assert sum(len(labels) for _, labels in batches) == 32
    images, labels = batches[0]
    assert labels[0] == labels[2] and not torch.equal(images[0], images[2])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, r"data\.root and data\.urls are both null; set one"),
        ({"root": "a", "urls": "b"}, r"data\.root and data\.urls are both set"),
        (
            {"root": "{packed}", "num_classes": 7},
            r"data\.num_classes is 7, but the shards of val/ have 4 classes \(class0",
        ),
        ({"root": "{packed}/none"}, r"none/train has neither index\.json nor tars"),
        ({"urls": "{packed}/*.zip"}, r"data\.urls is '.*\.zip', which no file matches"),
        (
            {"urls": "{packed}/{{0..3}}.tar"},
            r"/0\.tar does not exist. Check data\.root or data\.urls",
        ),
    ],
)
def test_wrong_settings_are_explained(
    options: dict[str, Any], said: str, packed: Path, tmp_path: Path
) -> None:
    """By the setting, the value and what to do."""
    filled = {
        key: value.format(packed=packed) if isinstance(value, str) else value
        for key, value in options.items()
    }
    with pytest.raises((ConfigError, DataError), match=said):
        ready(shards(**{"cache_dir": str(tmp_path), **filled}))


def test_an_interrupted_packing_is_no_data_set(packed: Path, tmp_path: Path) -> None:
    """Its tars are not taken for a whole one."""
    shutil.copytree(packed, tmp_path / "out")
    (tmp_path / "out" / "train" / "index.json").rename(tmp_path / "out" / "train" / "packing.json")
    with pytest.raises(DataError, match=r"is not complete: `data pack` was interrupted"):
        ready(shards(tmp_path / "out"))


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 2),
        ({"shuffle_shards": 3}, 3),
        ({"lanes": 2}, 8),
        ({"augment": Augment(repeats=2)}, 4),
        ({"shuffle_shards": 200}, 200),
        ({"shuffle_shards": 200, "lanes": 2}, 256),
    ],
)
def test_as_many_shards_stay_open_as_the_shuffle_reads(
    options: dict[str, Any], count: int, packed: Path
) -> None:
    """A window; two of each lane, as lanes and copies of a sample enter the next one at several
    times. Validation reads one after the other.
    """
    made = ready(shards(packed, **options))
    assert (made.train.num_open, made.val.num_open) == (count, 2)
    for _ in made.val_dataloader() or ():
        pass
    assert len(made.val._open) <= 2


def test_a_cache_too_small_for_the_shuffle_is_refused(tmp_path: Path) -> None:
    """Each shard would be fetched again and again; the error says which numbers fit."""
    made = shards(Path("unused"), cache_dir=str(tmp_path), cache_size_gb=1, shuffle_shards=16)
    index = Index(tuple(Shard(f"s3://a/{i}.tar", 10, 10**8) for i in range(100)))
    with pytest.raises(
        ConfigError,
        match=(
            r"data\.cache_size_gb is 1, but .* Set data\.cache_size_gb=3\.3 or"
            r" data\.shuffle_shards=4\."
        ),
    ):
        made._check_cache(index)
    shards(Path("unused"), cache_dir=str(tmp_path), cache_size_gb=1, shuffle_shards=4)._check_cache(
        index
    )


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"0.txt": b"", "0.cls": b"1"}, r"0\.tar: 0 has no file of an image"),
        ({"0.jpg": b""}, r"0\.tar: 0 has no file cls, the label \(data\.label\); it has jpg"),
        (
            {"0.jpg": b"", "0.cls": b"9"},
            r"0\.tar: 0: its label is b'9'; it must be a number from 0 to 3",
        ),
        ({"0.jpg": b"", "0.cls": b"cat"}, r"its label is b'cat'"),
        ({"0.jpg": b"\xff\xd8", "0.cls": b"1"}, r"0\.tar: 0 cannot be decoded as an image"),
    ],
)
def test_a_bad_sample_is_named(
    files: dict[str, bytes],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its shard and key; `data check` lists it."""
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with tarfile.open("0.tar", "w") as tar:
        for name in files:
            tar.add(name)
    made = ready(shards(urls=str(tmp_path / "0.tar"), cache_dir=str(tmp_path)))
    with pytest.raises(DataError, match=said):
        next(iter(made.train_dataloader()))
    typed = [
        "check",
        "conf=resnet18",
        "data=webdataset",
        f"data.urls={tmp_path}/0.tar",
        "data.num_classes=4",
        "workers=0",
    ]
    assert data.main("data", [*typed, "data.num_workers=0", f"data.cache_dir={tmp_path}"]) == 1
    assert "bad sample of train: index 0" in capsys.readouterr().out
