"""Each behaviour runs in Lightning and in trainkit, in one process:
equal, refused, or different for a reason.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainkit
import trainkit.callbacks
import trainkit.loggers
from tests.same_names import logs, page, ports, runs, steps
from tests.same_names.kit import Framework
from tests.same_names.table import ROWS, Row
from trainkit.errors import TrainkitError

assert steps and runs and logs and ports, "their import fills the table"


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    """Lightning warns of small data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def lightning_kit(folder: Path) -> Framework:
    """Return Lightning's names."""
    pl = pytest.importorskip("lightning.pytorch")
    return Framework(
        "lightning",
        pl.LightningModule,
        pl.LightningDataModule,
        pl.Callback,
        pl.callbacks,
        pl.loggers,
        pl,
        folder,
    )


def trainkit_kit(folder: Path) -> Framework:
    """Return trainkit's."""
    names = (
        trainkit.Task,
        trainkit.DataModule,
        trainkit.Callback,
        trainkit.callbacks,
        trainkit.loggers,
        trainkit,
    )
    return Framework("trainkit", *names, folder)


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: row.run.__name__ if row.run.__name__ != "run" else row.name
)
def test_the_same_name_means_the_same(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it is refused, or the page says why it differs."""
    monkeypatch.chdir(tmp_path)
    there: Any = row.run(lightning_kit(tmp_path / "lightning"))
    if row.verdict == "refused":
        with pytest.raises(TrainkitError) as caught:
            row.run(trainkit_kit(tmp_path / "trainkit"))
        assert re.search(row.text, str(caught.value))
        return
    here = row.run(trainkit_kit(tmp_path / "trainkit"))
    if row.verdict == "equal":
        assert here == there
    else:
        assert here != there, "equal now: change its verdict"


def test_the_page_says_so() -> None:
    """docs/lightning.md has the table: after a change, run python -m tests.same_names.page."""
    assert page.PAGE.read_text() == page.written()
    assert len(ROWS) >= 100
