"""Reading arguments from source, compared with Python's own inspection."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

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
        "trainkit.callbacks.Timeline",  # of an extension
        "trainkit.engine.select.auto_engine",
        "recipes.digits.Digits",
        "recipes.mlp.MLP",
    ],
)
def test_the_arguments_are_those_that_python_sees(target: str) -> None:
    """Names, and which are required, equal inspect.signature's of the imported object."""
    module, name = target.rsplit(".", 1)
    seen = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    named = {
        n: p
        for n, p in seen.items()
        if p.kind is not p.VAR_KEYWORD and p.kind is not p.VAR_POSITIONAL
    }
    read = read_signature(target, "key")
    assert list(read.parameters) == list(named)
    assert {n for n, p in read.parameters.items() if p.required} == {
        n for n, p in named.items() if p.default is p.empty
    }
    assert read.accepts_any == any(p.kind is p.VAR_KEYWORD for p in seen.values())


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_package.Thing", "no module 'no_such_package'"),
        ("recipes.digit.Digits", "Did you mean 'digits'?"),
        ("recipes.digits.Digit", "Did you mean 'Digits'?"),
        ("trainkit.callbacks.EarlyStoping", "Did you mean 'EarlyStopping'?"),
        ("trainkit.callbacks.Timelin", "Did you mean 'Timeline'?"),
        ("trainkit.Traner", "Did you mean 'Trainer'?"),
    ],
)
def test_a_missing_name_raises(target: str, words: str) -> None:
    """A wrong module or name is an error with the nearest right one."""
    with pytest.raises(ConfigError) as caught:
        read_signature(target, "task._target_")
    assert words in str(caught.value)


def test_a_class_of_ones_own_has_the_arguments_of_an_extensions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its base is imported by the public name."""
    (tmp_path / "own_capsule.py").write_text(
        "from trainkit.callbacks import CrashCapsule\n\nclass Mine(CrashCapsule): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_signature("own_capsule.Mine", "key") == read_signature(
        "trainkit.callbacks.CrashCapsule", "key"
    )
    assert "keep" in read_signature("own_capsule.Mine", "key").parameters
