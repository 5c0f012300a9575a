"""Attributes of Lightning's ModelCheckpoint that have no effect here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import ModelCheckpoint


class Own(ModelCheckpoint):
    """One with Lightning's own values, and one other."""

    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".pt"


def test_attributes_without_effect_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Set on the object, as Lightning's documentation shows it, or by a subclass."""
    keeper: Any = ModelCheckpoint()
    keeper.CHECKPOINT_NAME_LAST = "{epoch}-last"
    own = Own(dirpath=str(tmp_path / "other"))
    quiet(tmp_path / "run", callbacks=[keeper, own]).fit(Line(), loader(4))
    said = capsys.readouterr().out
    last = (
        "ModelCheckpoint.CHECKPOINT_NAME_LAST is '{epoch}-last', and has no effect here: the link"
    )
    assert said.count("has no effect here") == 2
    assert last in said and "ModelCheckpoint.FILE_EXTENSION is '.pt'" in said
    quiet(tmp_path / "plain", callbacks=ModelCheckpoint()).fit(Line(), loader(4))
    assert "has no effect here" not in capsys.readouterr().out
