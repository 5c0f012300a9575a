"""recipes/models.py: models by name, heads, and pretrained weights out of a cache."""

from __future__ import annotations

import sys
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from PIL import Image
from torch import nn

from recipes.image_classifier import ImageClassifier
from recipes.imagefolder import ImageFolder
from recipes.models import image_model, with_head
from tests.helpers.toy import quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.errors import ConfigError


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """Give torch an empty cache."""
    before = torch.hub.get_dir()
    torch.hub.set_dir(str(tmp_path))
    yield tmp_path / "checkpoints"
    torch.hub.set_dir(before)


def held(cache: Path) -> dict[str, torch.Tensor]:
    """Put weights of a ResNet-18 in the cache, as if they were downloaded; return them."""
    weights = torchvision.models.resnet18().state_dict()
    cache.mkdir(parents=True)
    torch.save(
        weights, cache / torchvision.models.ResNet18_Weights.IMAGENET1K_V1.url.rpartition("/")[2]
    )
    return weights


@pytest.mark.parametrize("num_classes", [7, 1000])
def test_weights_by_name_and_a_head_for_the_classes(num_classes: int, cache: Path) -> None:
    """All layers are the pretrained ones; the head too, if the number of classes is theirs."""
    weights, model = held(cache), image_model("resnet18", num_classes, "IMAGENET1K_V1")
    found = model.state_dict()
    assert found["fc.weight"].shape == (num_classes, 512)
    same = {
        name
        for name in weights
        if found[name].shape == weights[name].shape and torch.equal(found[name], weights[name])
    }
    assert {*weights} - same == (set() if num_classes == 1000 else {"fc.weight", "fc.bias"})


def test_one_rank_of_a_host_downloads_at_a_time(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait until the first is done, and then find its file."""
    inside, most = [0], [0]

    def download(*args: Any, **options: Any) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)  # a download
        inside[0] -= 1
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", download)
    errors: list[str] = []

    def rank() -> None:
        try:
            image_model("resnet18", 10, "DEFAULT")
        except ConfigError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=rank) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert len(errors) == 3 and all(
        "cannot be downloaded" in text and "init_weights=FILE" in text for text in errors
    )


@pytest.mark.parametrize("name", ["squeezenet1_0", "mobilenet_v3_small", "vit_b_32"])
def test_a_head_is_replaced_wherever_it_is(name: str) -> None:
    """The head of any torchvision model, convolution or matrix, gets the new number of outputs."""
    with torch.device("meta"):
        model = with_head(torchvision.models.get_model(name, num_classes=1000), 1000, 3)
        model.eval()
        assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 3)


def test_resnets_begin_as_the_identity() -> None:
    """With random weights the last norm of each block is zero, unless an option says otherwise."""
    assert image_model("resnet18", 3).layer1[0].bn2.weight.abs().sum() == 0
    assert (
        image_model("resnet18", 3, options={"zero_init_residual": False})
        .layer1[0]
        .bn2.weight.abs()
        .sum()
        > 0
    )


@pytest.mark.parametrize("name", ["inception_v3", "googlenet"])
def test_a_model_with_auxiliary_logits_returns_its_own_alone(name: str) -> None:
    """In training too: the loss is that of one tensor of logits."""
    with torch.device("meta"):
        model = image_model(name, 3, options={"init_weights": False}).train()
        assert model(torch.zeros(2, 3, 96, 96)).shape == (2, 3)


@pytest.mark.parametrize("name", ["inception_v3", "googlenet"])
def test_pretrained_weights_with_auxiliary_logits_return_their_own_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchvision's weights have those layers, and its functions refuse to leave them out."""
    kind = torchvision.models.get_model_weights(name)
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *_, **__: {})
    monkeypatch.setattr(kind, "get_state_dict", lambda *_, **__: {})
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda *_, **__: None)
    with torch.device("meta"):
        model = image_model(name, 3, "IMAGENET1K_V1").train()
        assert model(torch.zeros(2, 3, 96, 96)).shape == (2, 3)


def test_a_model_of_timm() -> None:
    """timm:NAME builds it with the head."""
    model = image_model("timm:test_resnet", 3, options={"drop_path_rate": 0.1})
    assert isinstance(model, nn.Module) and model.get_classifier().out_features == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("resnet51", 3), "task.model is 'resnet51'.*Did you mean 'resnet50'"),
        (
            ("resnet18", 3, "IMAGENET1K_V2"),
            "'IMAGENET1K_V2', which resnet18 does not have: there are IMAGENET1K_V1",
        ),
        (("resnet18", 3, None, {"depth": 3}), r"refuses task\.model_options \(.*\): .*depth"),
        (("timm:resnet51", 3), "timm has no such model. Did you mean"),
        (
            ("timm:resnet50", 3, "a4_in1k"),
            "'a4_in1k', which timm:resnet50 does not have: there are DEFAULT, a1_in1k",
        ),
        (
            ("timm:test_resnet", 3, None, {"depth": 3}),
            r"refuses task\.model_options \(.*\): .*depth",
        ),
    ],
)
def test_a_name_that_does_not_exist_is_explained(arguments: Any, text: str) -> None:
    """The error names the key, the value, and the nearest or all that exist."""
    with pytest.raises(ConfigError, match=text):
        image_model(*arguments)


def write_images(folder: Path) -> None:
    """Write an image of each of two classes for training, and for validation."""
    for part in ("train", "val"):
        for label in ("cat", "dog"):
            (folder / part / label).mkdir(parents=True)
            Image.new("RGB", (32, 32)).save(folder / part / label / "a.png")


def test_weights_for_other_pixels_are_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A validation with pretrained weights says how the images have to be normalized for them; then
    with the settings that it names it says nothing.
    """
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained, **rest: create(name, **rest))
    model = image_model("timm:test_vit", 2, "DEFAULT")
    write_images(tmp_path)

    def validate(ckpt_path: str | None = None, **settings: Any) -> str:
        task = ImageClassifier(model, torch.optim.SGD)
        data = ImageFolder(
            str(tmp_path), batch_size=2, num_classes=2, image_size=32, num_workers=0, **settings
        )
        quiet(tmp_path / "run").validate(task, datamodule=data, ckpt_path=ckpt_path)
        return " ".join(capsys.readouterr().out.split())

    said = validate()
    assert "data.mean is [0.485, 0.456, 0.406], data.std is [0.229, 0.224, 0.225]. Set" in said
    assert "Set data.mean=[0.5,0.5,0.5] data.std=[0.5,0.5,0.5]" in said
    assert "normalized otherwise" not in validate(mean=[0.5] * 3, std=[0.5] * 3)
    trainer = quiet(tmp_path / "run", max_steps=1, callbacks=ModelCheckpoint())
    settings = {"batch_size": 2, "num_classes": 2, "image_size": 32, "num_workers": 0}
    trainer.fit(
        ImageClassifier(model, torch.optim.SGD), datamodule=ImageFolder(str(tmp_path), **settings)
    )
    assert "normalized otherwise" in " ".join(capsys.readouterr().out.split())
    assert "normalized otherwise" not in validate(ckpt_path="last")  # they know these pixels


def test_a_missing_timm_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"pip install 'trainkit\[timm\]'"):
        image_model("timm:resnet50", 3)
