"""Each behaviour runs in Lightning and in trainkit, in one process or on two ranks:
equal, refused, or different for a reason.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launching import run_command
from tests.same_names import (
    batches,
    by_hand,
    epochs,
    logs,
    monitors,
    on_ranks,
    page,
    ports,
    ranks,
    resumes,
    runs,
    steps,
)
from tests.same_names.kit import data
from tests.same_names.kits import lightning_kit, trainkit_kit
from tests.same_names.table import ROWS, ROWS_OF_RANKS, Row
from trainkit.errors import TrainkitError

assert all((batches, by_hand, epochs, logs, monitors, ports, ranks, resumes, runs, steps)), (
    "their import fills the table"
)


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    """Lightning warns of small data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return what the rows of two ranks return: trainer -> [rank 0's, rank 1's]."""
    pytest.importorskip("lightning.pytorch")
    folder = tmp_path_factory.mktemp("ranks")
    results = {}
    for name in ("lightning", "trainkit"):
        line = f"torchrun --nproc-per-node 2 {on_ranks.__file__} {name} {folder}"
        done = run_command(line, folder, timeout_s=180)
        assert done.code == 0, done.err
        files = [folder / f"{name}-{rank}.json" for rank in range(2)]
        results[name] = [json.loads(file.read_text()) for file in files]
        results[f"{name}'s output"] = [{"printed": done.out}]
    return results


@pytest.mark.parametrize("row", ROWS_OF_RANKS, ids=lambda row: row.run.__name__)
def test_the_same_name_means_the_same_on_two_ranks(row: Row, of_ranks: Any) -> None:
    """Or it is refused, or the page says why it differs."""
    there = [rank[row.name] for rank in of_ranks["lightning"]]
    here = [rank[row.name] for rank in of_ranks["trainkit"]]
    assert not any("Error: " in str(result) for result in there), there
    if row.verdict == "refused":
        assert all(re.search(row.text, result) for result in here)
    elif row.verdict == "equal":
        assert here == there
    else:
        assert not any("Error: " in str(result) for result in here), here
        assert here != there, "equal now: change its verdict"


def test_a_line_says_that_a_steps_value_is_rank_0s(of_ranks: Any) -> None:
    """Of a value that is logged with sync_dist=True."""
    printed = of_ranks["trainkit's output"][0]["printed"]
    assert printed.count("log('rank', sync_dist=True): the value of a step is rank 0's") == 1


def test_a_datamodule_of_lightnings_leaves_a_tasks_transfer_hooks(tmp_path: Path) -> None:
    """Those that its base class has change nothing; one of its own comes before the Task's."""
    there, here = lightning_kit(tmp_path / "lightning"), trainkit_kit(tmp_path / "trainkit")
    seen: list[str] = []

    class Theirs(there.DataModule):  # type: ignore[name-defined, misc]
        def train_dataloader(self) -> Any:
            return data(8)

        def val_dataloader(self) -> Any:
            return None

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            seen.append("before, of the DataModule")
            return batch

    def on_after_batch_transfer(self: Any, batch: Any, dataloader_idx: int) -> Any:
        seen.append("after, of the Task")
        return batch

    task = here.line(on_after_batch_transfer=on_after_batch_transfer)
    here.trainer(max_epochs=1).fit(task, datamodule=Theirs())
    assert seen == ["before, of the DataModule", "after, of the Task"]


def test_the_page_says_so() -> None:
    """docs/lightning.md has the table: after a change, run python -m tests.same_names.page."""
    assert page.PAGE.read_text() == page.written()
    assert len(ROWS) >= 100
