"""`data check`: every sample once, and those that cannot be loaded by file and error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from torchvision.io import write_jpeg

from tests.helpers.toy import Numbered
from trainkit.extensions.data import command as data
from trainkit.extensions.reports.reading import readings


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Return a folder of images of which one of each part is broken."""
    for part in ("train", "val"):
        for name in ("a/0", "a/1", "b/0"):
            path = tmp_path / part / f"{name}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_jpeg(torch.zeros(3, 8, 8, dtype=torch.uint8), str(path))
    (tmp_path / "train/a/1.jpg").write_bytes(b"\xff\xd8 truncated")
    (tmp_path / "val/b/0.jpg").write_bytes(b"nothing")
    return tmp_path


def check(root: Path, *more: str) -> int:
    """Run the command on a folder of images."""
    typed = [
        "check",
        "conf=resnet18",
        "data=imagefolder",
        f"data.root={root}",
        "data.num_classes=2",
        "data.image_size=8",
    ]
    return data.main("data", [*typed, "data.num_workers=0", "workers=0", *more])


def test_bad_samples_are_listed(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is printed with its index, file and error; the exit code is 1."""
    assert check(images) == 1
    out, err = capsys.readouterr()
    assert f"bad sample of train: index 1: {images}/train/a/1.jpg cannot be decoded" in out
    assert f"bad sample of val: index 2: {images}/val/b/0.jpg cannot be decoded" in out
    assert "train: 3 samples read" in out
    assert "2 samples cannot be loaded" in err and "data.on_bad_sample=skip" in err


def test_good_data_passes(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without bad samples the exit code is 0; `stage=test` reads the test data alone."""
    (images / "val/b/0.jpg").write_bytes((images / "val/a/0.jpg").read_bytes())
    assert check(images, "stage=test") == 0
    out = capsys.readouterr().out
    assert "test: 3 samples read" in out and "train" not in out


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["chek", "conf=mlp"], "'data chek' is not a command"),
        (
            ["check", "conf=mlp", "stage=all"],
            "stage is 'all'; it must be one of fit, test, predict",
        ),
        (["check", "conf=mlp", "data.on_bad_sample=ignore"], "data.on_bad_sample is 'ignore'"),
        (
            ["check", "conf=mlp", "data.on_bad_sample=skip", "trainer.on_bad_sample=raise"],
            "they are one setting",
        ),
    ],
)
def test_a_wrong_request_is_explained(
    typed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and what is legal."""
    assert data.main("data", typed) == 2
    assert said in capsys.readouterr().err


def test_workers_read_every_sample_once() -> None:
    """Loaders of one data set are read once, by as many workers as the loader has."""
    rows = Numbered(37)
    (reading,) = readings(
        [
            ("train", DataLoader(rows, 4, num_workers=2)),
            ("val", DataLoader(rows, 4)),
            ("test", None),
        ],
        0,
    )
    assert reading.num_workers == 2
    assert sum(count for count, _ in reading.read(seed=0)) == 37


def test_a_stream_is_read_to_its_first_error() -> None:
    """A generator cannot be read on."""

    def batches() -> object:
        yield torch.zeros(2)
        raise OSError("gone")

    (reading,) = readings([("train", batches())], 0)
    found = list(reading.read(seed=0))
    assert [len(bad) for _, bad in found] == [0, 1]
    assert found[1][1][0].describe() == "OSError: gone"
