"""Modules of Lightning that a project still imports, by trainkit's name."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from trainkit.safety.tracebacks import text_of


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("trainkit.utilities", "from trainkit import rank_zero_only, seed_everything"),
        ("trainkit.utilities.rank_zero", "know no rank of Horovod"),
        ("trainkit.callbacks.model_checkpoint", "from trainkit.callbacks import ModelCheckpoint"),
        ("trainkit.strategies", "Trainer(engine=..."),
        ("trainkit.pytorch.callbacks", "LightningModule is trainkit.Task"),
        ("trainkit.profilers", "from trainkit import SimpleProfiler"),
        ("trainkit.tuner.tuning", "trainkit.find_lr"),
        ("trainkit.fabric", "trainkit.Loop"),
    ],
)
def test_the_error_says_what_to_import(module: str, says: str) -> None:
    """Once, and in the report of a command too."""
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module(module)
    assert says in str(raised.value)
    assert text_of(raised.value).endswith(str(raised.value))


def test_a_name_of_the_package_says_so_too() -> None:
    """As in `from trainkit import utilities`."""
    with pytest.raises(ImportError, match="trainkit has no utilities.*from trainkit import rank_"):
        exec("from trainkit import utilities")


def test_others_are_as_python_says() -> None:
    """A search finds nothing, without an error."""
    for module in ("trainkit.nothing", "trainkit.callbacks.Nothing", "trainkit.extensions.nothing"):
        assert importlib.util.find_spec(module) is None
