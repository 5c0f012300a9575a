"""--json: every command that looks at something has it, and prints the keys that the table of
docs/reference/cli.md names.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import trainkit.__main__
from tests.helpers.toy import Line, loader
from trainkit.cli.as_json import FLAG, facts_printed, print_json, split_json
from trainkit.cli.commands import all_commands, find_usage, parts_of
from trainkit.trainer import Trainer

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cli.md"
# They act: what they print is a report of what was done.
ACTS = {"fit", "predict", "export", "serve", "generate", "tune", "completion", "launch"}
ACTS |= {"data tokens", "data pack", "horovod install", "horovod wheel"}
OF_ARGPARSE = {"horovod": ("check", "install", "wheel"), "deepspeed": ("check",)}
PARTS = {"find": ("lr", "batch", "workers", "settings"), **OF_ARGPARSE}


def table() -> dict[str, list[str]]:
    """Return the page's table: command -> keys."""
    rows = re.findall(r"^\| `([\w -]+)` \| (.*?) \| .*\|$", PAGE.read_text(), flags=re.MULTILINE)
    return {command: re.findall(r"`(\w+)`", keys) for command, keys in rows}


def looking() -> list[str]:
    """Return the commands that look at something, each part of one by itself."""
    every: list[str] = []
    for name in all_commands():
        parts = [*PARTS.get(name, ()), *parts_of(name)]
        every += [f"{name} {part}" for part in parts] or [name]
    return [name for name in every if name not in ACTS]


def test_the_table_has_every_command_that_looks() -> None:
    """A new command is in the table, or among those that act."""
    assert len(looking()) > 15
    assert sorted(table()) == sorted(looking())


@pytest.mark.parametrize("name", looking())
def test_each_takes_the_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its --help names it."""
    command = name.split(" ")[0]
    if command in OF_ARGPARSE:
        main = __import__(
            f"trainkit.extensions.{command.replace('horovod', 'horovod_build')}.command"
        )
        module = getattr(main.extensions, command.replace("horovod", "horovod_build")).command
        with pytest.raises(SystemExit):
            module.main(command, ["check", "--help"])
        assert FLAG in capsys.readouterr().out
        return
    usage = find_usage(name) or find_usage(command)
    assert usage is not None
    assert any(option[0] == FLAG for option in usage.options), name


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a run has ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Trainer(max_epochs=1, run_dir="runs/mine", enable_progress_bar=False).fit(Line(), loader(8))
    return tmp_path / "runs" / "mine"


def printed(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, Any]:
    """Run a command with --json; return its exit code, and what it has printed."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["trainkit", *line.split(" "), FLAG])
    code = trainkit.__main__.main()
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "line",
    ["show runs/mine", "runs runs", "status runs/mine", "plan conf=mlp", "data check conf=mlp"],
)
def test_the_keys_are_those_of_the_table(
    line: str,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And nothing but JSON is on the standard output."""
    code, facts = printed(line, monkeypatch, capsys)
    assert code == 0
    name = " ".join(word for word in line.split(" ") if word.isalpha() and word != "runs") or "runs"
    sometimes = ("engines", "layouts", "memory_gb", "stages", "folders")
    keys = [key for key in table()[name] if key not in sometimes]
    assert list(facts) == keys or not keys, line


def test_a_plan_in_a_memory_has_all_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layouts as rows, and as values in bytes."""
    code, facts = printed("plan conf=mlp memory_gb=1", monkeypatch, capsys)
    assert code == 0
    assert list(facts) == [key for key in table()["plan"] if key not in ("memory_gb", "stages")]
    first = facts["layouts"][0]
    assert (first["settings"], first["fits"]) == ("engine=auto", True)
    assert first["device_bytes"] > first["stages"][0]["weights"] > 0
    assert facts["engines"][-1] == ["use", "python -m trainkit fit conf=mlp"]


def test_lists_and_names_are_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """extensions and explain print what they list."""
    _, listed = printed("extensions", monkeypatch, capsys)
    assert {"name", "source", "summary", "proven", "commands"} <= set(listed[0])
    _, errors = printed("explain", monkeypatch, capsys)
    one = next(iter(errors))
    assert printed(f"explain {one}", monkeypatch, capsys) == (0, {one: errors[one]})


def test_what_people_read_goes_to_the_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """With the flag; without it nothing is redirected, and no JSON is printed."""
    with facts_printed(True) as facts:
        print("progress")
        facts["loss"] = float("nan")
    assert capsys.readouterr() == ('{\n "loss": null\n}\n', "progress\n")
    with facts_printed(False) as facts:
        print("progress")
        facts["loss"] = 1.0
    assert capsys.readouterr() == ("progress\n", "")
    assert split_json(["a", FLAG, "b"]) == (["a", "b"], True)


def test_a_command_that_failed_prints_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A reader of the output sees that there is none, not half of it."""
    with pytest.raises(ValueError), facts_printed(True) as facts:
        facts["x"] = 1
        raise ValueError
    assert capsys.readouterr().out == ""
    print_json([(1, float("inf")), Path("a")])
    assert json.loads(capsys.readouterr().out) == [[1, None], "a"]
