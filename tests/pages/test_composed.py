"""Every command and config of the README and of docs/ is composed and checked, in one process and
without torch.

The pages run in the groups of their subjects (tests/e2e/test_guides.py names the test of each),
which `make test` leaves out. What goes stale most is here: a setting, a choice of a group, a conf,
a command or a key that is no more.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.page_tests import DOCS, ELSEWHERE, GUIDES, TUTORIALS, parts_of
from tests.helpers.pages import ROOT, Block, blocks, prepare
from tests.helpers.pages import commands as commands_of
from trainkit.cli import commands

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What an earlier command of the page makes only if it runs, and a package that stands beside this
# environment.
_LATER = re.compile(
    r"'runs/[^']*', (which holds no config.yaml|and there is no such file)|data.root is"
    r" '(tokens|masked|web|code)'"
    r"|DeepSpeed is not installed"
)
_END = {"|", "||", "&", "&&", ";", ">", ">>", "2>&1", "<"}


class Checked(BaseException):
    """A command was checked: the rest of it is not run."""


@dataclass(frozen=True)
class Typed:
    """A trainkit command of a page:
    its arguments, and the ranks that a launcher before it would start.
    """

    arguments: list[str]
    launcher: str = ""
    ranks: int = 1

    @property
    def environment(self) -> dict[str, str]:
        """What the launcher would set on rank 0."""
        sizes = {
            "RANK": "0",
            "SIZE": str(self.ranks),
            "LOCAL_RANK": "0",
            "LOCAL_SIZE": str(self.ranks),
        }
        if self.launcher in ("horovodrun", "mpirun"):
            return {f"HOROVOD_{key}": value for key, value in sizes.items()}
        if self.launcher == "torchrun":
            sizes |= {"WORLD_SIZE": sizes.pop("SIZE"), "LOCAL_WORLD_SIZE": sizes.pop("LOCAL_SIZE")}
            return sizes | {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
                "TORCHELASTIC_RUN_ID": "page",
            }
        return {}


def typed(line: str) -> Typed | None:
    """Return the trainkit command in a shell command, under any launcher; None if there is none."""
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:  # part of a quoted program for another shell
        words = line.replace("'", " ").split()
    starts = [
        i for i, word in enumerate(words) if word == "trainkit" and i and words[i - 1] == "-m"
    ]
    if not starts:
        return None
    before, rest = words[: starts[0]], words[starts[0] + 1 :]
    arguments = rest[: next((i for i, word in enumerate(rest) if word in _END), len(rest))]
    launcher = next((word for word in before if word in ("horovodrun", "mpirun", "torchrun")), "")
    ranks = [
        int(after)
        for word, after in pairwise(before)
        if word in ("-np", "--nproc-per-node") and after.isdigit()
    ]
    return (
        Typed(arguments, launcher, ranks[0] if ranks else 2 * bool(launcher) or 1)
        if arguments
        else None
    )


def trainkit_commands(block: Block) -> list[Typed]:
    """Return the trainkit commands of a block, run by the page's own test or not."""
    lines = [line.replace("/data/imagenet", "images") for line in block.commands]
    parts = [part for line in lines for part in re.split(r"\s(?:&&|\|\|)\s", line)]
    return [command for command in map(typed, parts) if command is not None]


@pytest.fixture
def checker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """A function that checks a command in an empty folder:
    what it would raise, or print as an error, fails.
    """
    compose: Any = importlib.import_module("trainkit.config.compose")
    run, parse = compose.run, argparse.ArgumentParser.parse_args

    def composed(command: str, arguments: list[str], is_main: bool, *_: Any) -> None:
        jobs: list[Any] = []
        run(command, arguments, is_main, jobs.append)
        for job in jobs:  # a later command of the page may be about this run
            folder = tmp_path / job.config["trainer"].get("run_dir", "runs/composed")
            for name, text in job.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
        raise Checked

    def parsed(self: Any, *arguments: Any) -> None:
        parse(self, *arguments)
        raise Checked

    def scripted(*_: Any) -> None:
        raise Checked

    entry: Any = importlib.import_module("trainkit.extensions.script.entry")
    monkeypatch.setattr(compose, "run", composed)
    monkeypatch.setattr(entry, "_look_at_script", scripted)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    # where it is noted which error a rank of this job has printed within the last minute
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("noted")))
    monkeypatch.setattr(os, "_exit", exited)  # of a rank that fails
    before = dict(os.environ)

    for name in commands.parts_of("data"):
        part = commands.command_of(f"data {name}")
        assert part is not None
        module = importlib.import_module(part.main.rpartition(".")[0])
        if hasattr(module, "read_keys"):  # `data check` takes a config, which is composed
            stop_after_keys(module, monkeypatch)

    main: Any = importlib.import_module("trainkit.__main__")

    def check(command: Typed) -> int:
        name, *rest = command.arguments
        if not name.startswith("-"):
            known = commands.command_of(name)
            assert known is not None, f"no command: {name}"
            module = importlib.import_module(known.main.rpartition(".")[0])
            if hasattr(module, "read_keys"):
                stop_after_keys(module, monkeypatch)
            elif name in ("timeline", "replay", "doctor", "explain", "completion"):
                given = {
                    word.partition("=")[0]
                    for word in rest
                    if "=" in word and "/" not in word.partition("=")[0]
                }
                usage = commands.find_usage(name)
                assert given <= set(usage.keys() if usage is not None else ()), command
                return 0
        monkeypatch.setattr(sys, "argv", ["trainkit", *command.arguments])
        os.environ.update(command.environment)
        try:
            return int(main.main())
        except Checked:
            return 0
        except Exited as ended:
            return ended.code
        finally:
            os.environ.clear()
            os.environ.update(before)

    return check


class Exited(BaseException):
    """A rank ended its process."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def exited(code: int) -> None:
    """Raise in the place of ending pytest."""
    raise Exited(code)


def stop_after_keys(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """End a command without a config once its arguments are read."""
    read = module.read_keys

    def then_stop(*given: Any) -> None:
        read(*given)
        raise Checked

    monkeypatch.setattr(module, "read_keys", then_stop)


def is_about_what_would_be_there(error: str) -> bool:
    """Return whether an error only misses what an earlier
    command of the page makes when it runs.
    """
    return bool(_LATER.search(error))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_are_legal(
    page: Path, checker: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the page's order, with the files that it writes;
    what ends with an error there ends with it here, or later.
    """
    prepare(tmp_path)
    for block in blocks(page):
        if block.file is not None:
            path = tmp_path / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.content)
        commands = trainkit_commands(block)
        for command in commands:
            capsys.readouterr()
            code = checker(command)
            printed = capsys.readouterr()
            is_right = code == 0 or (command is commands[-1] and block.is_expected(code))
            is_right |= is_about_what_would_be_there(printed.err)
            assert is_right, (
                f"{page.name}: {shlex.join(command.arguments)}\nended with {code}:"
                f" {printed.err[-1500:]}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_of_a_page_compiles(page: Path) -> None:
    """Each block is a program or a part of one."""
    for block in blocks(page):
        if block.language == "python" and "..." not in block.text.splitlines():
            compile(block.text, str(page), "exec")


@pytest.mark.parametrize("page", ELSEWHERE)
def test_a_command_that_a_page_leaves_to_another_runs_there(page: str) -> None:
    """In a part of that page which a test runs from top to bottom."""
    parts = [*parts_of(GUIDES), *parts_of(TUTORIALS)]
    for line, other in ELSEWHERE[page].items():
        assert line in commands_of(DOCS / f"{page}.md"), f"{page} has no `{line}`"
        titles = [title for name, title in parts if name == other]
        run = [each for title in titles for each in commands_of(DOCS / f"{other}.md", title)]
        assert line in run and line not in ELSEWHERE.get(other, {}), f"{other} runs no `{line}`"


def test_a_setting_that_is_no_more_fails(checker: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The check can fail: for a setting, a choice of a group, a conf,
    a command's key, and a command.
    """
    for line in (
        "fit conf=mlp trainer.max_epoch=1",
        "fit conf=mlp optimizer=sdg",
        "fit conf=resnet51",
        "find lr conf=mlp step=20",
        "show runs/mine title=x",
        "horovod instal",
    ):
        try:
            code = checker(Typed(shlex.split(line)))
        except SystemExit as ended:  # argparse
            code = ended.code
        assert code == 2, f"{line}: {code} {capsys.readouterr()}"


def test_it_needs_no_torch() -> None:
    """A check without torch is a quarter of a second; with it, it would be four."""
    program = (
        "import sys; import trainkit.config.compose as compose; jobs = []\ncompose.run('fit',"
        " ['conf=resnet50', 'optimizer=sgd'], True, jobs.append)\nassert jobs and 'torch' not in"
        " sys.modules, [name for name in sys.modules if 'torch' in name][:5]"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
