"""pytest's side: --group NAME runs the tests of one group, and writes how long each took.

The figures of a group are one file, build/tests/NAME.json, with how many programs were started. Its
tests are those of `Group.tests`; a test that another group names more closely is left out.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.groups.table import ROOT, all_groups, group_of

BUILD = ROOT / "build" / "tests"
_PROGRAMS = re.compile(
    r"(^|[/\s'\"])(python[\d.]*|horovodrun|torchrun|mpirun|srun|sbatch|trainkit)($|[\s'\"])"
)
TO_KEEP = "to keep it, put above"  # before an example that failed
_started = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --group."""
    parser.addoption(
        "--group", help="run the tests of this group of tests/groups.toml, and record their seconds"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Count the programs that tests start; record seconds in the process that reports."""
    sys.addaudithook(_count)
    if config.getoption("--group") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("--group")), "trainkit-recorder")


def _count(event: str, arguments: tuple[Any, ...]) -> None:
    """Count a start of Python or of a launcher; forks of tests/helpers/forks.py cost no start."""
    global _started  # noqa: PLW0603 - an audit hook has no other place
    if event == "subprocess.Popen":
        words = arguments[1]
        line = words if isinstance(words, str) else " ".join(map(os.fsdecode, words))
        _started += _PROGRAMS.search(line) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other groups."""
    name = config.getoption("--group")
    if name is None:
        return
    groups = all_groups()
    if name not in groups:
        raise pytest.UsageError(f"--group is '{name}'; it must be one of {', '.join(groups)}")
    chosen = [item for item in items if group_of(item.nodeid, groups) == name]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note with each report how many programs were started since the last one."""
    global _started  # noqa: PLW0603
    outcome: Any = yield
    outcome.get_result().user_properties = [("started", _started)]
    _started = 0


class Recorder:
    """Collects seconds, starts and outcomes of tests, and writes them at the end."""

    def __init__(self, group: str) -> None:
        self.group, self.start = group, time.monotonic()
        self.seconds: dict[str, float] = {}
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.skips: dict[str, int] = {}
        self.failures: list[str] = []
        self.started = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one report: set-up, call or teardown of a test."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        self.started += dict(report.user_properties).get("started", 0)
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.outcome == "failed" and report.nodeid not in self.failures:
            self.failures.append(report.nodeid)
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            reason = str(report.longrepr[2])
            self.skips[reason] = self.skips.get(reason, 0) + 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the file."""
        record = {
            "seconds": round(time.monotonic() - self.start, 1),
            "exit": int(exitstatus),
            **self.counts,
            "started": self.started,
            "skips": self.skips,
            "failures": self.failures,
            "tests": {name: round(seconds, 3) for name, seconds in self.seconds.items()},
        }
        BUILD.mkdir(parents=True, exist_ok=True)
        write_record(self.group, record)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print each example on which a claim for all inputs failed as
        the line that keeps it: @example(...).
        """
        for report in terminalreporter.stats.get("failed", []):
            for line in examples(str(report.longrepr)):
                terminalreporter.write_line(f"{TO_KEEP} {Path(report.nodeid).name}: {line}")


def read_record(group: str) -> dict[str, Any]:
    """Return what the last run of a group wrote; {} if there is none."""
    file = BUILD / f"{group}.json"
    record: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return record


def write_record(group: str, record: dict[str, Any]) -> None:
    """Write a group's record."""
    (BUILD / f"{group}.json").write_text(json.dumps(record, indent=0))


def record_commit(group: str, commit: str) -> None:
    """Note the commit at which a group has run."""
    if record := read_record(group):
        write_record(group, record | {"commit": commit})


def examples(text: str) -> list[str]:
    """Return hypothesis' falsifying examples in a failure's text as decorators;
    those drawn inside a test have none.
    """
    lines = []
    for found in re.finditer(r"Falsifying example: \w+\((.*?)\n[E ]*\)", text, re.DOTALL):
        arguments = re.sub(r"\n[E ]*", " ", re.sub(r"#.*", "", found[1])).strip().rstrip(",")
        try:
            call = ast.parse(f"example({arguments})", mode="eval")
        except SyntaxError:  # a strategy's object without a readable form
            continue
        lines.append("@" + ast.unparse(call))
    return lines
