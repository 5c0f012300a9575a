"""data.decode=dali: DALI decodes what trainkit draws."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.augment import Augment
from recipes.dali_images import DaliDecoder, EncodedImages, LateDecoder
from recipes.imagefolder import ImageFolder
from tests.helpers.pictures import write_pictures
from trainkit.data.loader import ShardedLoader, read_source
from trainkit.data.plan import StepPlan
from trainkit.device.transfer import to_device
from trainkit.errors import ConfigError, DataError

PEERS = Path(sys.prefix, "dali")  # `make peers` installs it there


@pytest.fixture
def dali(monkeypatch: pytest.MonkeyPatch) -> None:
    """DALI, or a skip."""
    monkeypatch.syspath_prepend(str(PEERS))
    if (
        importlib.util.find_spec("nvidia") is None
        or importlib.util.find_spec("nvidia.dali") is None
    ):
        pytest.skip("DALI is not installed: make peers, or pip install nvidia-dali-cuda130")


def folder(root: Path, **options: Any) -> ImageFolder:
    """Return the data module, set up, on photographs of 97 x 97 pixels."""
    if not (root / "train").exists():
        write_pictures(root, 16, 4, size=97)
    made = ImageFolder(
        str(root), batch_size=4, num_classes=4, image_size=32, **{"num_workers": 0, **options}
    )
    made.setup("fit")
    return made


def batches(made: ImageFolder, epoch: int, start: int = 0) -> list[Any]:
    """Return the training batches of an epoch, as a rank gets them."""
    source = read_source(made.train_dataloader(), "train", True)
    assert source is not None
    plan = StepPlan(source.num_samples, source.batch_size)
    loader = ShardedLoader(source, plan, 0, seed=3, agree=lambda order: order)
    return list(loader.iterate(plan, epoch, start))


@pytest.mark.parametrize("workers", [0, 2])
def test_crops_and_flips_are_those_of_torchvision(workers: int, dali: None, tmp_path: Path) -> None:
    """The same images in the same order, and pixels that differ by little;
    another epoch's differ by much.
    """
    ours = folder(tmp_path, num_workers=workers)
    theirs = folder(tmp_path, decode="dali", num_workers=workers)
    expected, found, other = batches(ours, 1), batches(theirs, 1), batches(theirs, 2)
    for (x, x_labels), (y, y_labels) in zip(expected, found, strict=True):
        assert torch.equal(x_labels, y_labels) and (y.shape, y.dtype) == (x.shape, x.dtype)
        assert (x - y).abs().mean() < 0.05
    assert (expected[0][0] - other[0][0]).abs().mean() > 0.3


def test_batches_are_the_same_when_repeated(dali: None, tmp_path: Path) -> None:
    """From the middle of an epoch on too: bit for bit."""
    made = folder(tmp_path, decode="dali")
    whole = batches(made, 0)
    late = batches(folder(tmp_path, decode="dali"), 0, 2)
    assert len(late) == 2 and all(
        torch.equal(x, y) for (x, _), (y, _) in zip(whole[2:], late, strict=True)
    )


def test_validation_is_the_centre_crop(dali: None, tmp_path: Path) -> None:
    """As torchvision makes it, but for rounding; of the last short batch, too."""
    ours, theirs = (folder(tmp_path, decode=name) for name in ("torchvision", "dali"))
    for (x, x_labels), (y, y_labels) in zip(
        ours.val_dataloader(), theirs.val_dataloader(), strict=True
    ):
        assert torch.equal(x_labels, y_labels)
        assert (x - y).abs().mean() < 0.05


def test_a_late_batch_is_decoded_by_the_rank(dali: None, tmp_path: Path) -> None:
    """Workers pass the bytes on, and the way to the device makes the images,
    cast as any batch's.
    """
    folder(tmp_path)
    encoded = EncodedImages(
        [(str(path), 1) for path in sorted((tmp_path / "val").rglob("*.jpg"))], crops=False
    )
    samples = [encoded[i] for i in range(4)]
    images, labels = to_device(LateDecoder(32, 36, 4)(samples), torch.device("cpu"), torch.float64)
    expected, _ = DaliDecoder(32, 36, 4)(samples)
    assert (
        images.dtype == torch.float64
        and torch.equal(images, expected.double())
        and labels.tolist() == [1] * 4
    )


def test_it_says_once_what_differs(
    dali: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When training starts."""
    folder(tmp_path, decode="dali")
    assert (
        capsys.readouterr().out.count(
            "decode=dali: crops and flips are those of decode=torchvision"
        )
        == 1
    )


@pytest.mark.parametrize("kept", [0, 2, 700])
def test_a_broken_file_is_named(kept: int, dali: None, tmp_path: Path) -> None:
    """Whether its header or its end is missing."""
    write_pictures(tmp_path, 4, 4, size=97)
    path = tmp_path / "train" / "class1" / "image.001.jpg"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"image\.001\.jpg"):
        batches(folder(tmp_path, decode="dali"), 0)


def test_what_dali_cannot_do_is_refused(dali: None, tmp_path: Path) -> None:
    """Policies and erasing, and a GPU that is not there."""
    for augment in (Augment(policy="randaugment"), Augment(random_erasing=0.1)):
        with pytest.raises(
            ConfigError,
            match=(
                r"data\.augment has a policy or random_erasing, which need data\.decode=torchvision"
            ),
        ):
            ImageFolder(str(tmp_path), augment=augment, decode="dali")
    if not torch.cuda.is_available():
        with pytest.raises(
            ConfigError, match=r"data\.decode_device is gpu, but this process sees no GPU"
        ):
            ImageFolder(str(tmp_path), decode="dali", decode_device="gpu")


def test_without_dali_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is read; a device without DALI has no effect, and is refused."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"DALI is not installed: pip install nvidia-dali"):
        ImageFolder(str(tmp_path), decode="dali")
    with pytest.raises(
        ConfigError, match=r"data\.decode_device is gpu, which is of data\.decode=dali"
    ):
        ImageFolder(str(tmp_path), decode_device="gpu")
