"""Which checkpoint is meant: the newest whole one, the best, or the one that was named."""

from __future__ import annotations

import errno
import re
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import fill, line, load, snapshot, store_of, written
from trainkit.checkpoint.find import later
from trainkit.checkpoint.find import written as written_at
from trainkit.checkpoint.format import now
from trainkit.checkpoint.places import make_store
from trainkit.checkpoint.store import LocalStore
from trainkit.errors import CheckpointError, NoCheckpointError


def test_last_is_the_newest(tmp_path: Path) -> None:
    """ "last" is the checkpoint that was written last, not the target of the link."""
    store = store_of(tmp_path)
    fill(store, "b", "c", "a")
    store.point("last", "b")
    loaded = load("last", [store], line(), resume=True)
    assert loaded is not None
    assert loaded == (store.path_of("a"), {"step": 2})


AHEAD = "2099-01-01T00:00:00.00000{}+00:00"


def test_each_checkpoint_is_later_than_those_before_whatever_the_clocks(tmp_path: Path) -> None:
    """The host before had a clock that is ahead, and wrote into another store of the run."""
    store, other = store_of(tmp_path), LocalStore(tmp_path / "other")
    other.write("a", replace(snapshot(), written=AHEAD.format(0)))
    fill(store, "b")
    assert later("", [store, other]) == AHEAD.format(1)
    assert later(AHEAD.format(1), [store, other]) == AHEAD.format(2)
    assert AHEAD.format(0) > later("", [store]) >= written_at(store, "b")


@pytest.mark.parametrize("text", ["yesterday", "", "2099", None])
def test_a_time_that_cannot_be_read_stops_no_checkpoint(tmp_path: Path, text: Any) -> None:
    """Of another program's manifest; a damaged one has none."""
    store = store_of(tmp_path)
    store.write("a", replace(snapshot(), written=text))
    fill(store, "b")
    (store.folder / "b" / "manifest.json").write_text("{}")
    assert later("", [store]) <= now()


class Gone(LocalStore):
    """A store that does not answer."""

    def names(self) -> list[str]:
        """Raise what a lost mount, or a bucket without rights to list it, does."""
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_store_that_cannot_be_read_stops_no_checkpoint_of_another(tmp_path: Path) -> None:
    """What the others hold still counts."""
    store, gone = store_of(tmp_path), Gone(tmp_path / "gone")
    store.write("a", replace(snapshot(), written=AHEAD.format(0)))
    assert later("", [gone, store]) == AHEAD.format(1)
    assert later("", [gone]) <= now()


class First(LocalStore):
    """A store whose checkpoints are the newest."""

    comes_first = True  # type: ignore[assignment]


def test_of_a_store_that_comes_first_others_are_not_read(tmp_path: Path) -> None:
    """They are if what it has is damaged."""
    first, other, said = First(tmp_path / "first"), store_of(tmp_path), list[str]()
    fill(first, "a")
    fill(other, "b")
    manifest = other.folder / "b" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text("{}")
    loaded = load("auto", [other, first], line(), resume=True, say=said.append)
    assert loaded is not None and loaded[0] == first.path_of("a") and said == []
    (first.folder / "a" / "training.pt").unlink()
    manifest.write_text(text)
    loaded = load("auto", [other, first], line(), resume=True, say=said.append)
    assert loaded is not None and loaded[0] == other.path_of("b") and len(said) == 1


@pytest.mark.parametrize("name", ["manifest.json", "training.pt", "weights.safetensors"])
def test_a_damaged_newest_is_named_and_the_one_before_taken(tmp_path: Path, name: str) -> None:
    """If the newest is damaged, it is named, and the run resumes from the one before."""
    store, said = store_of(tmp_path), []
    fill(store, "a", "b", "c")
    for damaged in ("c", "b"):
        path = store.folder / damaged / name
        path.write_bytes(path.read_bytes()[:-9])
    loaded = load("auto", [store], line(), resume=True, say=said.append)
    assert loaded is not None
    assert loaded[0] == store.path_of("a")
    assert sorted(re.findall(r"checkpoints/(\w) is", " ".join(said))) == ["b", "c"]
    assert "The one before it is taken." in said[0]


def test_what_was_named_is_taken_or_refused(tmp_path: Path) -> None:
    """A damaged checkpoint that was requested by its path, or as the best, is refused;
    no other is taken.
    """
    store = store_of(tmp_path)
    fill(store, "a", "b")
    store.point("best", "b")
    (store.folder / "b" / "training.pt").unlink()
    for path in ("best", store.path_of("b")):
        with pytest.raises(
            CheckpointError,
            match=r"b is damaged: training\.pt is missing\. Take another one: ckpt_path=PATH",
        ):
            load(path, [store], line(), resume=True)


ALL_DAMAGED = r"ckpt_path is 'auto', and .* has no complete checkpoint; there are a\. .*ckpt_path=PATH.*run_dir="


def test_all_damaged_is_an_error(tmp_path: Path) -> None:
    """If there are checkpoints and none is complete, "auto" does not silently start a new run."""
    store, said = store_of(tmp_path), []
    fill(store, "a")
    (store.folder / "a" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=ALL_DAMAGED):
        load("auto", [store], line(), resume=True, say=said.append)
    assert len(said) == 1


def test_auto_is_nothing_where_there_is_nothing(tmp_path: Path) -> None:
    """ "auto" in a folder without checkpoints means a run from the start;
    "last" there is an error.
    """
    assert load("auto", [store_of(tmp_path)], line(), resume=True) is None
    with pytest.raises(CheckpointError, match=r"ckpt_path is 'last'"):
        load("last", [store_of(tmp_path)], line(), resume=True)


def test_auto_may_name_another_checkpoint_to_begin_with(tmp_path: Path) -> None:
    """Of "auto:PATH" PATH is taken if the run has none; a damaged one is not replaced by it."""
    store, other = store_of(tmp_path), LocalStore(tmp_path / "other")
    fill(other, "b")
    path = f"auto:{other.path_of('b')}"
    loaded = load(path, [store], line(), resume=True)
    assert loaded is not None and loaded[0] == other.path_of("b")
    with pytest.raises(NoCheckpointError, match=r"ckpt_path is 'auto:x'; it must be"):
        load("auto:auto:x", [store], line(), resume=True)
    fill(store, "a")
    loaded = load(path, [store], line(), resume=True)
    assert loaded is not None and loaded[0] == store.path_of("a")
    (store.folder / "a" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=ALL_DAMAGED):
        load(path, [store], line(), resume=True)
    said: list[str] = []
    store.write("a", snapshot())
    loaded = load(path, [store], line(), resume=True, say=said.append)
    assert loaded is not None and loaded[0] == other.path_of("b")
    assert said == [
        f"{store.path_of('a')} holds only weights: there is nothing to resume from, the run begins"
        f" at {other.path_of('b')}."
    ]


def test_a_run_cannot_resume_from_weights_only(tmp_path: Path) -> None:
    """A run resumes from the newest complete one;
    if all hold only weights, the error names their use.
    """
    store = store_of(tmp_path)
    store.write("bare", snapshot())
    with pytest.raises(
        CheckpointError,
        match=r"bare holds only weights: a run cannot resume .* init_weights=.*bare$",
    ):
        load("last", [store], line(), resume=True)
    assert load("last", [store], line(), resume=False) is not None
    fill(store, "whole")
    store.write("barer", snapshot())
    loaded = load("last", [store], line(), resume=True)
    assert loaded is not None
    assert loaded[0].endswith("whole")


def test_a_url_is_loaded(tmp_path: Path) -> None:
    """A checkpoint at a URL is found by its name, by `last` beside it,
    and as the last of its store.
    """
    store = make_store(f"memory://{uuid.uuid4().hex}/run")
    fill(store, "a", "b")
    store.point("last", "a")
    for path, name in ((f"{store.place}/b", "b"), (f"{store.place}/last", "a"), ("last", "b")):
        loaded = load(path, [store], line(), resume=True)
        assert loaded is not None
        assert loaded[0] == store.path_of(name)


def test_a_missing_best_lists_what_there_is(tmp_path: Path) -> None:
    """Without a "best", the message lists the checkpoints of the run."""
    written(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"ckpt_path is 'best', and .*checkpoints has no complete 'best'; there are one\.",
    ):
        load("best", [store_of(tmp_path)], line(), resume=False)


def test_a_run_without_checkpoints_points_to_the_newest_that_has(tmp_path: Path) -> None:
    """If this run has none, the message names the newest run beside it that does."""
    written(tmp_path)
    store_of(tmp_path).point("last", "one")
    with pytest.raises(
        CheckpointError,
        match=rf"no checkpoints there\. The newest run .* run_dir={tmp_path / 'run'}$",
    ):
        load("last", [make_store(tmp_path / "new" / "checkpoints")], line(), resume=True)
    with pytest.raises(
        CheckpointError, match=r"no checkpoints there\. Give the run's folder: run_dir=\.\.\.$"
    ):
        load(
            "last",
            [make_store(tmp_path / "elsewhere" / "new" / "checkpoints")],
            line(),
            resume=True,
        )


def test_a_path_that_is_no_checkpoint_raises_with_the_legal_ones(tmp_path: Path) -> None:
    """Any other folder is refused; the error describes a checkpoint's folder."""
    with pytest.raises(
        CheckpointError,
        match=r"must be 'last', 'best', or the folder of a checkpoint \(.*manifest\.json",
    ):
        load(str(tmp_path), [], line(), resume=True)


def test_a_file_of_a_checkpoint_names_its_folder(tmp_path: Path) -> None:
    """It is what plain loops load; another file has weights at most."""
    store_of(tmp_path).write("one", snapshot())
    file = next(tmp_path.rglob("manifest.json"))
    with pytest.raises(
        NoCheckpointError, match=f"file of one: ckpt_path={re.escape(str(file.parent))}"
    ):
        load(str(file), [], line(), resume=True)
    (other := tmp_path / "model.ckpt").write_bytes(b"weights")
    with pytest.raises(NoCheckpointError, match=f"init_weights={re.escape(str(other))}"):
        load(str(other), [], line(), resume=True)


def test_auto_starts_a_new_run_if_there_are_only_weights(tmp_path: Path) -> None:
    """A job that restarts with "auto" and finds only weights starts a new run, and says so."""
    store, said = store_of(tmp_path), []
    store.write("bare", snapshot())
    assert load("auto", [store], line(), resume=True, say=said.append) is None
    assert "bare holds only weights: there is nothing to resume from" in said[0]


def test_a_url_without_a_checkpoint_is_an_error_in_words() -> None:
    """An empty URL is reported as such, without a traceback of its library."""
    with pytest.raises(
        CheckpointError, match=r"ckpt_path is 'memory://nowhere/x', which cannot be read"
    ):
        load("memory://nowhere/x", [], line(), resume=True)
