"""A run's folder that hosts do not share is found before training.
Ranks are threads; each has a path of its own for it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.helpers.threads import ThreadEngine, World
from trainkit.errors import ConfigError
from trainkit.run import folder as folder_module
from trainkit.run.folder import check_shared


def checked(
    monkeypatch: pytest.MonkeyPatch,
    folders: Sequence[Path],
    *,
    needed: bool = True,
    trains: Sequence[bool] = (False,) * 9,
    splits_weights: bool = False,
    store: str = "/checkpoints",
    local_size: int = 1,
) -> list[str]:
    """Check with a rank for each folder; return what each one raised or printed, "" for neither."""

    def check(engine: ThreadEngine) -> str:
        rank, said = engine.place, []
        threading.current_thread().name = f"node{rank}"
        engine.ranks.assign(rank, len(folders), 0, local_size)
        engine.ranks.committed_step = 7 if trains[rank] else -1
        engine.splits_weights = splits_weights
        policy = SimpleNamespace(
            role="checkpoints", store_of=lambda run_dir: SimpleNamespace(place=store)
        )
        monkeypatch.setattr(engine.ranks, "say", said.append)
        try:
            check_shared(folders[rank], engine, cast(Any, [policy]), needed)
        except ConfigError as error:
            return str(error)
        return "".join(said)

    monkeypatch.setattr(folder_module, "host_name", lambda: threading.current_thread().name)
    return World(len(folders)).run(check)


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """The same path on three hosts, of which the last one has another disk."""
    shared = tmp_path / "shared" / "run"
    shared.mkdir(parents=True)
    return [shared, shared, tmp_path / "other" / "run"]


def test_a_shared_folder_passes(monkeypatch: pytest.MonkeyPatch, places: list[Path]) -> None:
    """No rank says anything, and no file is left."""
    assert checked(monkeypatch, places[:2]) == ["", ""]
    assert list(places[0].iterdir()) == []


def test_a_folder_of_one_host_alone_ends_all_ranks(
    monkeypatch: pytest.MonkeyPatch, places: list[Path]
) -> None:
    """All raise the same, which names folder, hosts and what to do; nothing is left on any host."""
    first, *others = checked(monkeypatch, places)
    pattern = (
        r"run_dir is '\S+/run', and node2 does not see it: it is not shared between the"
        r" hosts.*run_dir=.*dirpath=s3://"
    )
    assert all(re.search(pattern, text) for text in [first, *others])
    assert not places[0].exists() and not places[2].parent.exists()


def test_files_of_others_stay(monkeypatch: pytest.MonkeyPatch, places: list[Path]) -> None:
    """A folder that holds something is not removed."""
    places[2].mkdir(parents=True)
    for place in places:
        (place / "mine").touch()
    assert all(checked(monkeypatch, places))
    assert all([path.name for path in place.iterdir()] == ["mine"] for place in places)


def test_ranks_of_a_new_host_end_alone_if_the_others_train(
    monkeypatch: pytest.MonkeyPatch, places: list[Path]
) -> None:
    """Those that hold a commit continue, though one of them has lost its disk since."""
    errors = checked(monkeypatch, [places[0], places[2], places[2]], trains=[True, True, False])
    assert errors[:2] == ["", ""] and "does not see it" in errors[2]


@pytest.mark.parametrize(
    ("settings", "is_error"),
    [
        ({"needed": False}, False),
        ({"needed": False, "splits_weights": True}, True),
        ({"store": "s3://bucket/run"}, False),
    ],
)
def test_a_run_that_rank_0_alone_writes_is_reported(
    monkeypatch: pytest.MonkeyPatch, places: list[Path], settings: dict[str, Any], is_error: bool
) -> None:
    """It trains, as does one with checkpoints at a URL;
    one with ranks that write parts does not.
    """
    texts = checked(monkeypatch, places, **settings)
    assert all("node2 does not see it" in text for text in texts)
    assert all(("the run's files are on node0 alone" in text) is not is_error for text in texts)


@pytest.mark.parametrize("local_size", [1, 2])
def test_what_a_killed_rank_0_has_left_is_removed(
    monkeypatch: pytest.MonkeyPatch, places: list[Path], local_size: int
) -> None:
    """The next start removes its file, on one host too; the file of a job's driver stays."""
    (places[0] / ".shared-rank0-1234abcd").touch()
    (places[0] / ".shared-job-1234abcd").touch()
    assert checked(monkeypatch, places[:2], local_size=local_size) == ["", ""]
    assert [path.name for path in places[0].iterdir()] == [".shared-job-1234abcd"]


def test_one_host_sends_no_message(monkeypatch: pytest.MonkeyPatch, places: list[Path]) -> None:
    """All ranks are local: nothing is looked for."""
    assert checked(monkeypatch, [*places[:2], places[2]], local_size=3) == ["", "", ""]
