"""recipes/imagefolder.py: files become tensors, whichever library decodes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.augment import Augment
from recipes.imagefolder import ImageFolder
from recipes.photographs import load_image
from trainkit.data.sample_names import file_of
from trainkit.errors import ConfigError, DataError


def picture(mode: str) -> Image.Image:
    """Return an image of 40 x 30 pixels."""
    pixels = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("RGB", "a.jpg"),
        ("L", "a.jpg"),
        ("CMYK", "a.jpg"),
        ("RGBA", "a.png"),
        ("P", "a.gif"),
        ("RGB", "png.jpg"),
    ],
)
def test_an_image_is_what_pil_makes_of_it(mode: str, name: str, tmp_path: Path) -> None:
    """Colours, gray and CMYK, JPEG or not, under any file name: the same RGB values as PIL's."""
    path = tmp_path / name
    picture(mode).save(path, format="png" if name == "png.jpg" else None)
    with Image.open(path) as image:
        expected = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    assert torch.equal(load_image(str(path)), expected)


@pytest.mark.parametrize("kept", [0, 2, 200])
def test_a_cut_off_image_is_named(kept: int, tmp_path: Path) -> None:
    """Of a JPEG that is empty or ends too early the error names the file."""
    path = tmp_path / "cut.jpg"
    picture("RGB").save(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"cut\.jpg cannot be decoded"):
        load_image(str(path))


def test_batches_are_normalised_crops(tmp_path: Path) -> None:
    """A batch is float32 [B, 3, size, size] around zero, in training and in validation."""
    for part in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / part / label).mkdir(parents=True)
            picture("RGB").save(tmp_path / part / label / "a.jpg")
    data = ImageFolder(str(tmp_path), batch_size=2, num_classes=2, image_size=16, num_workers=0)
    data.setup("fit")
    for loader in (data.train_dataloader(), data.val_dataloader()):
        images, labels = next(iter(loader))
        assert (images.shape, images.dtype) == ((2, 3, 16, 16), torch.float32)
        assert sorted(labels.tolist()) == [0, 1]
        assert images.abs().max() < 3 and abs(images.mean()) < 1


def test_images_are_normalized_as_set(tmp_path: Path) -> None:
    """By `mean` and `std`, which the description for other programs has, too."""
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
        Image.new("RGB", (16, 16), (255, 0, 51)).save(tmp_path / part / "cat" / "a.png")
    own = {"mean": [0.5, 0.5, 0.1], "std": [0.5, 0.25, 0.1]}
    data = ImageFolder(str(tmp_path), 1, 1, image_size=16, num_workers=0, **own)
    data.setup("fit")
    for image, _ in (data.train[0], data.val[0]):
        torch.testing.assert_close(image[:, 8, 8], torch.tensor([1.0, -2.0, 1.0]))
    described = data.describe_input()["image"]
    assert {key: list(described[key]) for key in own} == own
    with pytest.raises(ConfigError, match=r"data\.mean is \[0\.5\]; it must be three numbers"):
        ImageFolder(str(tmp_path), 1, 1, mean=[0.5])


def test_augment_has_sizes_of_its_own_and_repeats(tmp_path: Path) -> None:
    """Training images have `train_image_size`, those of validation `image_size`;
    copies of an image differ.
    """
    for part in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / part / label).mkdir(parents=True)
            picture("RGB").save(tmp_path / part / label / "a.jpg")
    augment = Augment(
        policy="randaugment",
        random_erasing=1.0,
        train_image_size=8,
        test_crop_ratio=0.95,
        repeats=2,
    )
    data = ImageFolder(
        str(tmp_path), batch_size=2, num_classes=2, image_size=16, num_workers=0, augment=augment
    )
    data.setup("fit")
    (images, labels), (val_images, _) = (
        next(iter(loader)) for loader in (data.train_dataloader(), data.val_dataloader())
    )
    assert (images.shape, val_images.shape) == ((2, 3, 8, 8), (2, 3, 16, 16))
    assert labels[0] == labels[1] and not torch.equal(images[0], images[1])
    assert file_of(data.train_dataloader().dataset, 3) == str(tmp_path / "train" / "dog" / "a.jpg")


def test_without_crop_and_flip_training_sees_what_validation_sees(tmp_path: Path) -> None:
    """augment=none leaves no random transform."""
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
        picture("RGB").save(tmp_path / part / "cat" / "a.png")
    data = ImageFolder(
        str(tmp_path), 1, 1, image_size=16, num_workers=0, augment=Augment(crop_and_flip=False)
    )
    data.setup("fit")
    assert torch.equal(data.train[0][0], data.val[0][0])


@pytest.mark.parametrize(
    ("train", "val", "num_classes", "error", "words"),
    [
        (
            "abc",
            "ab",
            3,
            DataError,
            r"val has no folder for the classes that train/ has: c\. .*add it",
        ),
        ("ab", "abc", 3, DataError, r"train has no folder for the classes that val/ has: c\."),
        (
            "ab",
            "ab",
            3,
            ConfigError,
            r"train has 2 class folders \(a, b\)\. If none is missing, set data\.num_classes=2\.",
        ),
    ],
)
def test_a_missing_class_folder_is_named(
    train: str, val: str, num_classes: int, error: type[Exception], words: str, tmp_path: Path
) -> None:
    """The other part's folders show what is missing;
    the number of classes is doubted only if both have the same.
    """
    for part, labels in (("train", train), ("val", val)):
        for label in labels:
            (tmp_path / part / label).mkdir(parents=True)
            picture("RGB").save(tmp_path / part / label / "a.jpg")
    with pytest.raises(error, match=words):
        ImageFolder(
            str(tmp_path), batch_size=2, num_classes=num_classes, image_size=16, num_workers=0
        ).setup("fit")


@pytest.mark.parametrize("place", [".", "train/cat"])
def test_a_folder_of_texts_is_said_to_be_one(place: str, tmp_path: Path) -> None:
    """With the recipes that read it; a folder without texts has no such sentence."""
    (tmp_path / "texts" / place).mkdir(parents=True)
    (tmp_path / "texts" / place / "a.txt").write_text("Once")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"It holds texts \(a\.txt\): conf=gpt data\.root="):
        ImageFolder(str(tmp_path / "texts"), num_workers=0).setup("fit")
    with pytest.raises(DataError, match=r"and each a folder for each class\.$"):
        ImageFolder(str(tmp_path / "none"), num_workers=0).setup("fit")
