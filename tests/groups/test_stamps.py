"""Stamps: what ran when, which groups are due since, and which have not run for too long."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.groups import stamps
from tests.groups.__main__ import main
from tests.groups.stamps import (
    clean_commit,
    due,
    is_ancestor,
    joined,
    machine,
    read_stamps,
    stamp_of,
    too_old,
    write_stamps,
)
from tests.groups.table import Group

GROUPS = {
    "a": Group("a", "", 10, sources=("src/a",), tests=("tests/a",)),
    "b": Group("b", "", 10, sources=("src/b",), tests=("tests/b",)),
}
RECORD: dict[str, Any] = {
    "exit": 0,
    "failed": 0,
    "passed": 3,
    "skipped": 1,
    "started": 2,
    "seconds": 4.5,
    "cpu_s": 6.0,
    "tests": {},
    "skips": {},
}


class Repository:
    """A git repository with files of two groups."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self("init", "-q")
        for name in ("src/a/x", "src/b/x", "tests/a/x", "tests/b/x"):
            self.write(name, "1")
        self.first = self.commit()

    def __call__(self, *arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *identity, *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def write(self, name: str, text: str) -> None:
        """Write a file."""
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def commit(self) -> str:
        """Commit all files; return the commit."""
        self("add", "-A")
        self("commit", "-q", "--allow-empty", "-m", "one")
        return self("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A repository with one commit."""
    folder = tmp_path / "repository"
    folder.mkdir()
    return Repository(folder)


def test_only_a_complete_green_run_has_a_stamp() -> None:
    """A failure, an interrupted run and a run in which all tests were skipped have none."""
    stamp = stamp_of(RECORD, "abc")
    assert stamp is not None and stamp.pop("date") > "2026"
    assert machine().items() <= stamp.items() and stamp["cores"] >= 1
    figures = {"seconds": 4.5, "cpu_s": 6.0, "passed": 3, "skipped": 1, "started": 2}
    assert stamp == {"commit": "abc"} | machine() | figures
    for other in ({"exit": 1}, {"failed": 1}, {"exit": 2}, {"passed": 0}):
        assert stamp_of(RECORD | other, "abc") is None, other


def test_a_run_whose_failures_pass_later_has_a_stamp(repository: Repository) -> None:
    """At the commit of the complete run;
    not if one fails again, has not run, or ran at a commit of another line.
    """
    before = RECORD | {"exit": 1, "passed": 2, "failed": 1, "failures": ["t::one"], "commit": "abc"}
    again = RECORD | {"passed": 1, "skipped": 0, "seconds": 1.5, "cpu_s": 0.5, "started": 1}
    stamp = stamp_of(joined(before, again, commit_is_later=True), "abc")
    assert stamp is not None and stamp.pop("date") > "2026"
    figures = {"seconds": 6.0, "cpu_s": 6.5, "passed": 3, "skipped": 1, "started": 3}
    assert stamp == {"commit": "abc"} | machine() | figures
    for other in ({"failed": 1}, {"exit": 1}, {"passed": 0}):
        assert stamp_of(joined(before, again | other, commit_is_later=True), "abc") is None, other
    assert stamp_of(joined(before, again, commit_is_later=False), "abc") is None
    repository.write("src/a/x", "2")
    repository.commit()
    head = clean_commit(repository.folder)
    assert head is not None and is_ancestor(repository.first, head, repository.folder)
    assert not is_ancestor(head, repository.first, repository.folder)


def test_a_group_is_due_when_its_sources_or_tests_change(repository: Repository) -> None:
    """In the table's order; one without a stamp, or of a commit that is gone, is due."""
    known = {"a": {"commit": repository.first}, "b": {"commit": repository.first}}
    assert due(GROUPS, known, repository.folder) == []
    repository.write("src/b/x", "2")
    assert due(GROUPS, known, repository.folder) == []  # a commit is what counts
    repository.commit()
    assert [
        (one.group.name, one.since, one.changed) for one in due(GROUPS, known, repository.folder)
    ] == [("b", repository.first, ("src/b/x",))]
    repository.write("tests/a/x", "2")
    repository.commit()
    assert [one.group.name for one in due(GROUPS, known, repository.folder)] == ["a", "b"]
    unknown = due(GROUPS, {"a": {"commit": "0" * 40}}, repository.folder)
    assert [(one.group.name, one.since) for one in unknown] == [("a", None), ("b", None)]


def test_a_changed_file_leaves_no_clean_commit(repository: Repository) -> None:
    """But for those that a run writes itself."""
    assert clean_commit(repository.folder) == repository.first
    for name in ("tests/stamps.json", "CONTRIBUTING.md", "benchmarks/history.jsonl"):
        repository.write(name, "{}")
    assert clean_commit(repository.folder) == repository.first
    repository.write("src/a/y", "")
    assert clean_commit(repository.folder) is None


def test_a_group_that_has_not_run_for_150_commits_is_named(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is one that never ran; a shallow clone cannot count."""
    monkeypatch.setattr(stamps, "MOST_COMMITS", 2)
    known = {"a": {"commit": repository.first, "date": "2026-11-25T00:00:00+00:00"}}
    repository.write("tests/groups.toml", "[a]\n[b]\n")
    for _ in range(2):
        repository.commit()
    assert too_old(GROUPS, known, repository.folder) == {}
    repository.commit()
    repository.commit()
    assert too_old(GROUPS, known, repository.folder)["b"] == "has never run completely"
    assert too_old(GROUPS, known, repository.folder)["a"].startswith(
        f"has not run for 4 commits, since {repository.first[:9]}"
    )
    assert too_old(GROUPS, known, repository.folder.parent) == {}  # no repository


def test_a_merged_branch_counts_as_one_commit(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch of three commits, merged, is one: the group has run two commits ago."""
    monkeypatch.setattr(stamps, "MOST_COMMITS", 2)
    known = {"a": {"commit": repository.first, "date": "2026-11-25T00:00:00+00:00"}}
    repository("checkout", "-q", "-b", "branch")
    for _ in range(3):
        repository.commit()
    assert "a" in too_old({"a": GROUPS["a"]}, known, repository.folder)
    repository("checkout", "-q", "-")
    repository("merge", "-q", "--no-ff", "-m", "merge: branch", "branch")
    assert too_old({"a": GROUPS["a"]}, known, repository.folder) == {}


def test_stamps_of_other_groups_stay(tmp_path: Path) -> None:
    """A run of one group renews its own."""
    write_stamps({"a": {"commit": "1"}, "b": {"commit": "1"}}, tmp_path / "stamps.json")
    write_stamps({"b": {"commit": "2"}}, tmp_path / "stamps.json")
    assert {
        name: stamp["commit"] for name, stamp in read_stamps(tmp_path / "stamps.json").items()
    } == {"a": "1", "b": "2"}


def test_illegal_requests_print_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """With the names that there are."""
    for line in ("", "paralel", "due soon", "check now"):
        assert main(line.split()) == 2
        assert "The groups are check, unit, smoke," in capsys.readouterr().err
