"""Runs of groups: side by side as the cores carry, with what failed,
what was slow and what is over its budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import select
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.groups import __main__ as command
from tests.groups import plugin, report, runner
from tests.groups.plugin import Recorder, examples
from tests.groups.report import end_of_run, table
from tests.groups.runner import Ended, command_of, failures, run_groups
from tests.groups.stamps import Due
from tests.groups.table import Group, all_groups

RECORD: dict[str, Any] = {
    "exit": 0,
    "failed": 0,
    "passed": 3,
    "skipped": 1,
    "started": 2,
    "seconds": 4.5,
}
RECORD |= {"skips": {"no GPU": 1}, "tests": {"test_a": 4.0, "test_b": 0.5}}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "BUILD", tmp_path)


def commands(name: str, *lines: str, cores: float = 1, budget_s: int = 60) -> Group:
    """Return a group of shell commands."""
    return Group(name, "", budget_s, commands=lines, cores=cores)


def test_groups_run_beside_each_other_as_the_cores_carry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two light ones wait for each other's file; two heavy ones are never there together."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    meet = "touch {0}; for i in $(seq 100); do test -e {1} && exit 0; sleep 0.05; done; exit 1"
    a, b = tmp_path / "a", tmp_path / "b"
    light = [commands("a", meet.format(a, b)), commands("b", meet.format(b, a))]
    assert all(end.is_green for end in run_groups(light, [], io.StringIO()))
    alone = f"mkdir {tmp_path}/lock && sleep 0.3 && rmdir {tmp_path}/lock"
    heavy = [commands(name, alone, cores=2) for name in "cd"]
    assert [end.group.name for end in run_groups(heavy, [], io.StringIO()) if end.is_green] == [
        "c",
        "d",
    ]


def test_groups_that_are_interrupted_end_what_they_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C: each group has time for its fixtures, and nothing of it is left."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    listens = f"trap 'touch {tmp_path}/ended; exit 1' INT; sleep 60 & echo $! > {tmp_path}/a; wait"
    meet = f"until test -s {tmp_path}/a; do sleep 0.05; done"

    def interrupted(_: Ended) -> None:
        raise KeyboardInterrupt

    both = [commands("first", meet), commands("listens", listens)]
    with pytest.raises(KeyboardInterrupt):
        run_groups(both, [], io.StringIO(), interrupted)
    assert (tmp_path / "ended").exists()
    started = int((tmp_path / "a").read_text())
    with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(started)) as end:
        assert select.select([end], [], [], 20)[0]


def test_chosen_tests_run_in_place_of_their_files() -> None:
    """A failure that runs again does not bring all tests of its file."""
    group = Group(
        "one", "", 10, tests=("tests/a.py", "tests/b"), chosen=("tests/a.py::test_x[a b]",)
    )
    assert command_of(group, []).endswith("--group one 'tests/a.py::test_x[a b]' -n 2 --dist load")
    assert " tests/a.py tests/b " in command_of(dataclasses.replace(group, chosen=()), [])


def test_a_group_is_charged_what_its_programs_used() -> None:
    """Those that it waited for, whatever else runs on the machine."""
    spin = "import time; end = 0.3\nwhile time.process_time() < end: pass"
    (busy,) = run_groups([commands("busy", f'python3 -c "{spin}"')], [], io.StringIO())
    (idle,) = run_groups([commands("idle", "sleep 0.4")], [], io.StringIO())
    assert busy.record["cpu_s"] >= 0.3 > idle.record["cpu_s"]


def test_a_group_keeps_bytecode_in_a_shell_that_asks_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the folder that make names; otherwise each program of a group compiles torch."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    shown = "import sys; assert not sys.dont_write_bytecode; print(sys.pycache_prefix)"
    (end,) = run_groups([commands("one", f'python3 -c "{shown}"')], [], io.StringIO())
    assert end.is_green
    assert (runner.BUILD / "one.log").read_text() == f"{sys.prefix}/bytecode\n"


def test_a_failure_is_printed_when_its_group_ends() -> None:
    """With the last lines of its log; the group is not green."""
    out = io.StringIO()
    (end,) = run_groups([commands("one", "echo wrong; exit 3")], [], out)
    assert (
        not end.is_green
        and "one        1 failed in" in out.getvalue()
        and "\nwrong\n" in out.getvalue()
    )


def test_what_cannot_be_prepared_fails() -> None:
    """Without its tests."""
    (end,) = run_groups(
        [Group("one", "", 1, commands=("true",), prepare="false")], [], io.StringIO()
    )
    assert not end.is_green


def test_the_command_names_files_workers_and_options() -> None:
    """A group with workers=0 runs in pytest's own process."""
    group = Group("one", "", 1, tests=("tests/a",), dist="loadfile", prepare="prepare")
    assert command_of(group, ["-x"]).startswith("prepare && ")
    assert command_of(group, ["-x"]).endswith(
        "-m pytest -q --group one tests/a -x -n 2 --dist loadfile"
    )
    assert command_of(Group("one", "", 1, tests=("tests/a",), workers=0), []).endswith(
        "--group one tests/a"
    )


def test_a_long_failure_keeps_its_names() -> None:
    """The first lines, the names of all that failed, and the examples to keep."""
    lines = [
        "=== FAILURES ===",
        *["E"] * 300,
        f"{plugin.TO_KEEP} test_a: @example(1)",
        "FAILED test_a",
        "1 failed",
    ]
    text = failures("\n".join(["progress", *lines]))
    assert (
        "progress" not in text
        and "@example(1)" in text
        and "FAILED test_a" in text
        and len(text.splitlines()) < 160
    )


def test_a_budget_is_of_a_quiet_machine() -> None:
    """Beside another group a group may take longer, as the cores are shared."""
    group = commands("one", budget_s=4)
    assert Ended(group, RECORD, 1.0).is_over_budget and not Ended(group, RECORD, 1.5).is_over_budget


def test_the_end_names_slow_tests_skips_budgets_and_counts() -> None:
    """What one looks at after each run."""
    late = Ended(commands("late", budget_s=4), RECORD, 1.0)
    red = Ended(commands("red"), RECORD | {"exit": 1, "failed": 2}, 1.0)
    text = end_of_run([late, red], 9.2)
    assert text.index("4.0 s  test_a") < text.index("0.5 s  test_b")
    assert "2  no GPU" in text and "late took 4 s; its budget was 4 s" in text
    assert text.endswith("6 passed, 2 failed, 2 skipped in 9 s; failed: red")


def test_a_late_group_fails_only_the_run_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test` names it, `make test-all` ends with 1."""
    monkeypatch.setattr(command, "clean_commit", lambda: None)
    monkeypatch.setattr(
        command,
        "run_groups",
        lambda groups, options, on_end: [Ended(commands("late", budget_s=4), RECORD, 1.0)],
    )
    assert command._run([], []) == 0
    assert command._run([], [], budgets_count=True) == 1


def test_a_group_that_does_not_fit_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the commit since which it has not run; a shorter one after it may fit."""
    groups = {
        name: commands(name, budget_s=seconds)
        for name, seconds in {"a": 100, "b": 300, "c": 100}.items()
    }
    seen: list[Group] = []
    monkeypatch.setattr(command, "all_groups", lambda: groups)
    monkeypatch.setattr(command, "read_stamps", lambda: {"c": {"seconds": 130}})
    late = [Due(group, "0123456789", ("x", "y")) for group in groups.values()]
    monkeypatch.setattr(command, "due", lambda *_: late)
    monkeypatch.setattr(command, "_run", lambda chosen, *_, once_more: seen.extend(chosen) or 0)
    assert command.main(["due", "minutes=4"]) == 0
    printed = capsys.readouterr().out
    assert [group.name for group in seen] == ["a", "c"]
    assert (
        "b          is LEFT OUT (300 s, 140 s left): it has not run since 012345678: x, y"
        in printed
    )


FAILED: dict[str, Any] = RECORD | {"exit": 1, "failed": 1, "failures": ["t.py::odd"]}


@pytest.mark.parametrize(
    ("first", "again", "code"),
    [
        (FAILED, RECORD, 0),
        (FAILED, FAILED, 1),
        (FAILED, RECORD | {"passed": 0, "skipped": 1}, 1),
        (FAILED | {"failures": ["t.py::odd"] * 4}, RECORD, 1),
        (FAILED | {"exit": 2}, RECORD, 1),  # pytest was interrupted
    ],
)
def test_an_odd_failure_of_a_due_group_runs_once_more(
    first: dict[str, Any],
    again: dict[str, Any],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Alone: if it passes it is named, and the group has no stamp; a group that was asked for fails."""
    records, chosen = [first, again], []
    written: list[Any] = []

    def run(groups: list[Group], *_: Any, **__: Any) -> list[Ended]:
        chosen.extend(groups)
        return [Ended(groups[0], records[len(chosen) - 1], 1)]

    monkeypatch.setattr(command, "run_groups", run)
    monkeypatch.setattr(command, "clean_commit", lambda: None)
    monkeypatch.setattr(command, "write_stamps", written.append)
    monkeypatch.setattr(command, "write_record", lambda name, record: None)
    assert command._run([commands("a")], [], once_more=True) == code
    assert written == []
    named = "a has no stamp: beside other tests these failed, and alone they passed:\n  t.py::odd\n"
    assert (named in capsys.readouterr().out) == (code == 0)
    assert [group.chosen for group in chosen[1:]] in ([], [("t.py::odd",)])
    chosen.clear()
    assert command._run([commands("a")], []) == 1


@pytest.mark.parametrize("name", all_groups())
def test_each_group_runs_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make check` is a group too, not a command of the same name."""
    seen: list[Group] = []
    monkeypatch.setattr(command, "_run", lambda chosen, options: seen.extend(chosen) or 0)
    assert command.main([name]) == 0
    assert [group.name for group in seen] == [name]


def report_of(when: str, outcome: str, seconds: float) -> Any:
    """Return what pytest reports of a test that started one program."""
    report: Any = pytest.TestReport(
        "test_a", ("a", 1, "a"), {}, outcome, None, when, duration=seconds
    )  # type: ignore[arg-type]
    report.user_properties = [("started", 1)]
    return report


def test_seconds_and_starts_of_a_test_are_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over its set-up, call and teardown."""
    monkeypatch.setattr(plugin, "BUILD", tmp_path)
    recorder = Recorder("one")
    for when, outcome in (("setup", "passed"), ("call", "failed"), ("teardown", "passed")):
        recorder.pytest_runtest_logreport(report_of(when, outcome, 0.5))
    recorder.pytest_sessionfinish(1)
    record = runner.json.loads((tmp_path / "one.json").read_text())
    assert record["tests"] == {"test_a": 1.5} and record["started"] == 3
    assert (record["passed"], record["failed"], record["exit"], record["failures"]) == (
        0,
        1,
        1,
        ["test_a"],
    )


def test_programs_are_counted_and_others_not() -> None:
    """Python and launchers, wherever they are, in a list and in a line for the shell."""
    for line, counts in {
        "horovodrun -np 2 python a.py": True,
        "/usr/bin/python3.11 -c pass": True,
        "cd x && python -m trainkit fit": True,
        "git status": False,
        "ls pythonic": False,
    }.items():
        before = plugin._started
        plugin._count("subprocess.Popen", ("", line, None, None))
        plugin._count("subprocess.Popen", ("", line.split(), None, None))
        assert plugin._started - before == 2 * counts, line
    plugin._started = 0


def test_a_failing_example_is_a_line_to_paste() -> None:
    """As hypothesis prints it; one that is no expression is left out."""
    text = (
        "E   Falsifying example: test_a(\nE       x=[1, 2],  # or any other generated value\nE     "
        "  y='b',\nE   )\n"
    )
    assert examples(text) == ["@example(x=[1, 2], y='b')"]
    assert examples("Falsifying example: test_a(\n    x=<object>,\n)") == []


def test_the_table_has_the_figures_of_the_stamps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its marks in CONTRIBUTING.md."""
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- groups -->\nold\n<!-- end of groups -->\nafter")
    monkeypatch.setattr(report, "PAGE", page)
    report.write_table(
        table(
            {"one": commands("one")},
            {"one": {"passed": 3, "skipped": 1, "started": 2, "seconds": 4.5, "cpu_s": 6.6}},
        )
    )
    assert page.read_text().startswith(
        "before\n<!-- groups -->\n| group |"
    ) and page.read_text().endswith("groups -->\nafter")
    assert "| 4 | 2 | 4 | 7 |" in page.read_text()
