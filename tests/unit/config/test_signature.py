"""Reading arguments from source, held against what Python itself says."""

from __future__ import annotations

import importlib
import inspect

import pytest

from trainkit.config.signature import read_signature
from trainkit.errors import ConfigError


@pytest.mark.parametrize(
    "target",
    [
        "torch.optim.SGD",
        "torch.optim.AdamW",
        "torch.optim.lr_scheduler.OneCycleLR",
        "torchvision.models.resnet50",
        "torchvision.transforms.v2.RandomResizedCrop",
        "trainkit.trainer.Trainer",
        "trainkit.callbacks.ModelCheckpoint",
        "trainkit.engine.select.auto_engine",
        "recipes.digits.Digits",
        "recipes.mlp.MLP",
    ],
)
def test_the_arguments_are_those_that_python_sees(target: str) -> None:
    """Names, and which are required, equal inspect.signature's of the imported object."""
    module, name = target.rsplit(".", 1)
    seen = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    named = {n: p for n, p in seen.items() if p.kind is not p.VAR_KEYWORD and p.kind is not p.VAR_POSITIONAL}
    read = read_signature(target, "key")
    assert list(read.parameters) == list(named)
    assert {n for n, p in read.parameters.items() if p.required} == {n for n, p in named.items() if p.default is p.empty}
    assert read.accepts_any == any(p.kind is p.VAR_KEYWORD for p in seen.values())


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_package.Thing", "no module 'no_such_package'"),
        ("recipes.digit.Digits", "Did you mean 'digits'?"),
        ("recipes.digits.Digit", "Did you mean 'Digits'?"),
    ],
)
def test_a_missing_name_raises(target: str, words: str) -> None:
    """A wrong module or name is an error with the nearest right one."""
    with pytest.raises(ConfigError) as caught:
        read_signature(target, "task._target_")
    assert words in str(caught.value)
