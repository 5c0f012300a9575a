"""Data and tasks that declare different batches are refused before the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.cli.run import main
from trainkit.config.pairs import batch_shape

DATA = """
from recipes.digits import Digits
from recipes.gpt import TextBytes


class Undeclared:
    pass


class Mine(Digits):
    pass


class Sound(TextBytes):
    batch_shape = "waves [B, T]"


class Computed(Digits):
    batch_shape = "".join(["a", "b"])
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_data.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("my_data.Mine", "images [B, 3, H, W] and labels [B]"),
        ("my_data.Sound", "waves [B, T]"),
        ("my_data.Undeclared", None),
        ("my_data.Computed", None),
        ("my_data.Nothing", None),
        ("no_such_module.Data", None),
    ],
)
def test_a_class_declares_its_batch_or_inherits_it(name: str, shape: str | None) -> None:
    """Without a literal text there is nothing to compare."""
    assert batch_shape({"_target_": name}) == shape


def test_a_batch_may_depend_on_an_argument() -> None:
    """Texts have one label each if their number of classes is given, else one for each token."""
    texts = {"_target_": "recipes.hf_data.Texts"}
    assert str(batch_shape(texts | {"num_classes": 2})).endswith("labels [B]")
    assert str(batch_shape(texts | {"num_classes": None})).endswith("labels [B, T]")


def test_a_users_data_is_compared_too(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names both classes if no group was chosen, the two shapes, and what would match."""
    assert main("fit", ["conf=gpt", "data._target_=my_data.Sound"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "data._target_=my_data.Sound and task=gpt exclude each other" in said
    assert (
        "yields waves [B, T], the task takes tokens [B, T + 1]. Choose data=text|token_mixture|tokens"
        in said
    )
