"""peft behind the wall: the only home of peft (trainkit[peft])."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from trainkit.errors import ConfigError
from trainkit.extensions.adapters.quantized import dequantize

_NAME = "default"  # peft's name of a model's only adapter


def adapt(model: nn.Module, settings: dict[str, Any]) -> Any:
    """Replace layers of a model by ones with adapters, in place, and freeze all others.

    Args:
        settings: of peft.LoraConfig.

    Returns:
        The PeftModel.

    Raises:
        ConfigError: peft refuses a layer or a setting.
    """
    try:
        with _without_its_own_warnings():
            return peft.get_peft_model(model, peft.LoraConfig(**settings))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"peft does not adapt {type(model).__name__}: {' '.join(str(error).split())}"
        ) from error


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has layers of peft."""
    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def copies_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the trained copies of modules_to_save, by name."""
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            yield from module.named_modules(prefix=name)


def replaced(model: nn.Module) -> list[str]:
    """Return the names of the layers that `adapt` has replaced or copied."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
    ]


def unload(model: Any) -> None:
    """Put the plain layers back, without the adapters."""
    model.unload()


def dequantized(model: Any) -> Any:
    """Return a PeftModel of the same adapters, whose frozen weights of 4 bits are float32 now."""
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder))
        plain = model.unload()
        dequantize(plain)
        with _without_its_own_warnings():
            return peft.PeftModel.from_pretrained(plain, folder)


def merge(model: Any) -> None:
    """Put the plain layers back into the model, with the adapters added to their weights."""
    model.merge_and_unload()


def save(model: Any, folder: Path) -> None:
    """Write the adapters as peft does."""
    model.save_pretrained(str(folder), save_embedding_layers=False)


def load(folder: Path, model: nn.Module) -> None:
    """Put the adapters of a folder into a plain model, in place."""
    with _without_its_own_warnings():
        peft.PeftModel.from_pretrained(model, str(folder))


@contextlib.contextmanager
def _without_its_own_warnings() -> Iterator[None]:
    """Leave out what transformers says of attributes that peft reads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        yield
