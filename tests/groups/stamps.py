"""tests/stamps.json: the last complete green run of each group, and which groups are due since.

A stamp is {"commit", "date", "python", "torch", "cores", "seconds", "cpu_s", "passed", "skipped",
"started"}; those of before 2026-11-27 lack the three of the machine, and those of before the 28th the seconds
of processors. A run writes it only if
all tests of the group passed or were skipped, one passed, and the working tree was the commit's.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.groups.table import ROOT, Group

FILE = ROOT / "tests" / "stamps.json"
MOST_COMMITS = 150  # so long a group may stay unrun


@dataclass(frozen=True)
class Due:
    """A group that has not run since its sources changed.

    Attributes:
        since: the commit of its last complete green run; None: there was none that this repository
            knows.
        changed: the files that changed since.
    """

    group: Group
    since: str | None
    changed: tuple[str, ...] = ()


def read_stamps(file: Path = FILE) -> dict[str, dict[str, Any]]:
    """Return the stamps by name of the group."""
    return json.loads(file.read_text()) if file.is_file() else {}


def git(*arguments: str, root: Path = ROOT) -> str | None:
    """Return what git prints, without the last newline; None if it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None


def clean_commit(root: Path = ROOT) -> str | None:
    """Return the commit that the working tree is, or None if files differ from it;
    those that runs write do not count.
    """
    files = (
        "tests/stamps.json",
        "CONTRIBUTING.md",
        "benchmarks/results.json",
        "benchmarks/history.jsonl",
    )
    written = [f":!{file}" for file in files]
    if git("status", "--porcelain", "--", ".", *written, root=root) != "":
        return None
    return git("rev-parse", "HEAD", root=root)


def stamp_of(record: dict[str, Any], commit: str) -> dict[str, Any] | None:
    """Return the stamp for a group's record (plugin.Recorder),
    or None if the run was not complete and green.
    """
    if record["exit"] != 0 or record["failed"] or not record["passed"]:
        return None
    keys = ("seconds", "cpu_s", "passed", "skipped", "started")
    figures = {key: record[key] for key in keys if key in record}
    return {
        "commit": commit,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **machine(),
        **figures,
    }


def machine() -> dict[str, Any]:
    """Return what the tests run on."""
    return {
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "cores": len(os.sched_getaffinity(0)),
    }


def joined(before: dict[str, Any], again: dict[str, Any], commit_is_later: bool) -> dict[str, Any]:
    """Return the record of a complete run in which the tests that failed have run again.

    Args:
        before: of the complete run.
        again: of the run of its failures.
        commit_is_later: whether the second run's commit has that of the first among its ancestors;
            else nothing is joined.
    """
    is_green = (
        again["exit"] == 0 and not again["failed"] and again["passed"] == len(before["failures"])
    )
    if not commit_is_later or not is_green:
        return before
    keys = ("seconds", "cpu_s", "passed", "started")
    sums = {key: round(before[key] + again[key], 1) for key in keys if key in before}
    return before | sums | {"exit": 0, "failed": 0, "failures": []}


def is_ancestor(first: str, second: str, root: Path = ROOT) -> bool:
    """Return whether a commit is an ancestor of another, or the same."""
    return git("merge-base", "--is-ancestor", first, second, root=root) is not None


def write_stamps(stamps: dict[str, dict[str, Any]], file: Path = FILE) -> None:
    """Add stamps to the file; those of other groups stay."""
    file.write_text(json.dumps({**read_stamps(file), **stamps}, indent=2, sort_keys=True) + "\n")


def due(
    groups: dict[str, Group], stamps: dict[str, dict[str, Any]], root: Path = ROOT
) -> list[Due]:
    """Return the groups whose sources or tests changed since their stamp, in the table's order:
    the most valuable first.
    """
    result = []
    for group in groups.values():
        commit = stamps.get(group.name, {}).get("commit")
        changed = (
            git("diff", "--name-only", str(commit), "HEAD", "--", *group.due_after, root=root)
            if commit
            else None
        )
        if changed is None:
            result.append(Due(group, None))
        elif changed:
            result.append(Due(group, commit, tuple(changed.splitlines())))
    return result


def too_old(
    groups: dict[str, Group], stamps: dict[str, dict[str, Any]], root: Path = ROOT
) -> dict[str, str]:
    """Return why each group that has not run for MOST_COMMITS commits must run. Empty without git
    and its history.

    A group without a stamp counts from the commit that named it. A merged branch counts as one
    commit, however many it has: it is one change of what the group ran on.
    """
    if git("rev-parse", "--is-shallow-repository", root=root) != "false":
        return {}
    count = ("rev-list", "--count", "--first-parent")
    reasons = {}
    for name in groups:
        stamp = stamps.get(name)
        if stamp is None:
            first = (
                git("log", "--format=%H", "-S", f"[{name}]", "--", "tests/groups.toml", root=root)
                or ""
            ).split()
            if first and int(git(*count, f"{first[-1]}..HEAD", root=root) or 0) > MOST_COMMITS:
                reasons[name] = "has never run completely"
            continue
        age = git(*count, f"{stamp['commit']}..HEAD", root=root)
        if age is None:  # the commit was rewritten
            age = git(*count, f"--since={stamp['date']}", "HEAD", root=root) or "0"
        if int(age) > MOST_COMMITS:
            reasons[name] = (
                f"has not run for {age} commits, since {stamp['commit'][:9]} of"
                f" {stamp['date'][:10]}"
            )
    return reasons
