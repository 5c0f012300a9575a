"""Image models by name: torchvision's, and timm's as timm:NAME;
with random weights, or pretrained ones by name.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from trainkit.errors import ConfigError, did_you_mean

_SIZES = {"image_size": "data.image_size", "train_image_size": "data.augment.train_image_size"}
_OTHER_SIZE = "{0} is {1}, and the model takes {2} x {2} pixels alone: set {0}={2}, or task=."
_OTHER_INPUTS = (
    "{0} is {1}, so an image is {2} numbers (3 x {1} x {1}), and task.model.num_inputs is {3}: "
    "set task.model.num_inputs={2}, or {0}."
)
_RESNETS = ("resnet", "resnext", "wide_resnet")
_OPTIONS = {  # else they return other logits beside their own in training
    "googlenet": {"aux_logits": False},
    "inception_v3": {"aux_logits": False},
}


def image_model(
    name: str, num_classes: int, weights: str | None = None, options: dict[str, Any] | None = None
) -> nn.Module:
    """Return a model that maps images [B, 3, H, W] to logits [B, num_classes].

    Pretrained weights are downloaded to torch's (timm's: Hugging Face's) cache, by one rank of a
    host; the others wait for it. If they are for another number of classes, the head is a new one.

    Args:
        name: of torchvision.models, as resnet50; or timm:NAME, as timm:convnext_tiny.
        num_classes: number of logits.
        weights: of torchvision, as IMAGENET1K_V2; a tag of timm, as fb_in22k; DEFAULT for the best;
            None for random ones.
        options: further arguments of the model. torchvision's ResNets with random weights have
            `zero_init_residual`: each block starts as the identity (Goyal et al. 2017, section
            5.1).

    Raises:
        ConfigError: there are no such model or weights, timm is not installed, or a download fails.
    """
    if name.startswith("timm:"):
        return _timm_model(name.removeprefix("timm:"), num_classes, weights, options or {})
    names = torchvision.models.list_models(torchvision.models)
    if name not in names:
        raise ConfigError(
            f"task.model is '{name}'; it must be a model of torchvision.models, or"
            f" timm:NAME.{did_you_mean(name, names)}"
        )
    options = options or {}
    if weights is None:
        start = {"zero_init_residual": True} if name.startswith(_RESNETS) else {}
        start |= _OPTIONS.get(name, {})
        return _built(
            name, torchvision.models.get_model, num_classes=num_classes, **start | options
        )
    known = torchvision.models.get_model_weights(name)
    if weights not in known.__members__:
        raise ConfigError(_no_weights(name, weights, [*known.__members__]))
    chosen = known[weights]
    with _one_rank_downloads(
        f"{chosen.url} cannot be downloaded", weights, f"copy the file to {_cache()}"
    ):
        torch.hub.load_state_dict_from_url(
            chosen.url, progress=False, check_hash=True, weights_only=True
        )
    model = _built(name, torchvision.models.get_model, weights=chosen, progress=False, **options)
    if name == "inception_v3" and "aux_logits" not in options:  # its weights have the layers
        model.aux_logits, model.AuxLogits = False, None
    preset = chosen.transforms()
    model = with_head(model, len(chosen.meta["categories"]), num_classes)
    return _made_for(model, preset.mean, preset.std)


def with_head(model: nn.Module, before: int, num_classes: int) -> nn.Module:
    """Return the model with new layers in place of those with `before` outputs,
    if the number of classes differs.
    """
    if before == num_classes:
        return model
    for path, layer in [*model.named_modules()]:
        owner, _, last = path.rpartition(".")
        if isinstance(layer, nn.Linear) and layer.out_features == before:
            new: nn.Module = nn.Linear(layer.in_features, num_classes, layer.bias is not None)
        elif isinstance(layer, nn.Conv2d) and layer.out_channels == before:  # SqueezeNet
            new = nn.Conv2d(layer.in_channels, num_classes, layer.kernel_size)
        else:
            continue
        setattr(model.get_submodule(owner), last, new)
    return model


def check_pixels(model: nn.Module, data: Any) -> None:
    """Compare the size of the data's images with that of a model for one size, as ViT and MLP.

    Args:
        model: with `image_size` (torchvision's ViT) or `num_inputs` (MLP); others take any size.
        data: with `image_size`, and perhaps `train_image_size`; other data is not compared.

    Raises:
        ConfigError: they differ.
    """
    size, inputs = getattr(model, "image_size", None), getattr(model, "num_inputs", None)
    for name, key in _SIZES.items():
        pixels = getattr(data, name, None)
        if pixels is None:
            continue
        if isinstance(size, int) and pixels != size:
            raise ConfigError(_OTHER_SIZE.format(key, pixels, size))
        if isinstance(inputs, int) and 3 * pixels**2 != inputs:
            raise ConfigError(_OTHER_INPUTS.format(key, pixels, 3 * pixels**2, inputs))


def _made_for(model: Any, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
    """Note how images were normalized for a model's pretrained weights."""
    model.made_for = {"mean": tuple(mean), "std": tuple(std)}
    return model


def other_pixels(model: nn.Module, data: Any) -> str | None:
    """Return a line if a model's pretrained weights are for images that are normalized otherwise than
    the data's (`mean` and `std`; other data is not compared), else None.
    """
    made_for: dict[str, tuple[float, ...]] = getattr(model, "made_for", {})
    own = {
        key: numbers for key in made_for if isinstance(numbers := getattr(data, key, None), tuple)
    }
    differ = [key for key, numbers in own.items() if numbers != made_for[key]]
    if not differ:
        return None
    given = ", ".join(f"data.{key} is {list(own[key])}" for key in differ)
    wanted = " ".join(f"data.{key}={list(made_for[key])}".replace(", ", ",") for key in differ)
    return (
        f"task.weights were trained on images that are normalized otherwise: {given}. Set {wanted},"
        " or the model begins with inputs that it does not know."
    )


def _timm_model(
    name: str, num_classes: int, weights: str | None, options: dict[str, Any]
) -> nn.Module:
    try:
        import timm  # noqa: PLC0415 - an optional dependency; this is its only place
    except ImportError as error:
        raise ConfigError(
            f"task.model is 'timm:{name}', but timm is not installed: pip install 'trainkit[timm]'"
        ) from error
    plain, _, tag = name.partition(".")
    if not timm.is_model(plain):
        raise ConfigError(
            f"task.model is 'timm:{name}', and timm has no such"
            f" model.{did_you_mean(plain, timm.list_models())}"
        )
    tags = [full.partition(".")[2] for full in timm.list_pretrained(plain)]
    chosen = tag if weights in (None, "DEFAULT") else weights
    if (chosen and chosen not in tags) or (weights and not tags):
        raise ConfigError(
            _no_weights(f"timm:{plain}", str(weights or tag), ["DEFAULT", *tags] if tags else [])
        )
    full = f"{plain}.{chosen}" if chosen and weights else plain
    if weights is None:
        return _built(full, timm.create_model, num_classes=num_classes, **options)
    with _one_rank_downloads(
        f"timm's {full} cannot be downloaded",
        weights,
        "set HF_HUB_OFFLINE=1 and copy Hugging Face's cache",
    ):
        model = _built(full, timm.create_model, pretrained=True, num_classes=num_classes, **options)
    about: Any = model.pretrained_cfg
    return _made_for(model, about["mean"], about["std"])


def _built(name: str, make: Any, **arguments: Any) -> nn.Module:
    try:
        return make(name, **arguments)
    except (TypeError, ValueError, AssertionError) as error:  # ViT asserts a multiple of 16 pixels
        options = {key: value for key, value in arguments.items() if key != "num_classes"}
        refused = f"which refuses task.model_options ({options}): {error}"
        raise ConfigError(f"task.model is '{name}', {refused}") from error


def _no_weights(name: str, weights: str, known: list[str]) -> str:
    there = f"there are {', '.join(known)}" if known else "it has none"
    return (
        f"task.weights is '{weights}', which {name} does not have:"
        f" {there}.{did_you_mean(weights, known)}"
    )


def _cache() -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints"


@contextlib.contextmanager
def _one_rank_downloads(problem: str, weights: str, remedy: str) -> Iterator[None]:
    """Let the ranks of a host in one by one: the first downloads, the others find the file in the
    cache.

    Raises:
        ConfigError: the download fails.
    """
    _cache().mkdir(parents=True, exist_ok=True)
    with (_cache() / "trainkit.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, at an error too
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"task.weights is '{weights}', but {problem} ({error}). Without a network, {remedy}"
                " from a machine that has one; or give a file of weights: init_weights=FILE"
                " strict=false task.weights=null."
            ) from error
