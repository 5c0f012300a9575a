"""--help and --version: what there is to set, with types,
defaults and docstrings, without torch.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from trainkit.__main__ import _main as command_line
from trainkit.__main__ import main as program
from trainkit.cli.commands import all_commands, find_usage, parts_of
from trainkit.cli.run import main
from trainkit.cli.usage import read_in_part
from trainkit.config.documentation import arguments_of
from trainkit.config.resources import shipped_root
from trainkit.extensions.check_engine import command as check_engine
from trainkit.extensions.check_resume import command as check_resume
from trainkit.extensions.exporting.request import FORMATS
from trainkit.extensions.plan import command as plan
from trainkit.extensions.reports import data_command
from trainkit.extensions.timeline.scaling import command as scaling
from trainkit.version import __version__

# extensions' too, and the parts of `data`
NAMES = [*all_commands(), *(f"data {part}" for part in parts_of("data"))]
ALL = {name: usage for name in NAMES if (usage := find_usage(name)) is not None}


def test_help_lists_the_trainers_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its type, its default and a sentence; groups are listed above."""
    assert main("fit", ["--help"]) == 0
    text = capsys.readouterr().out
    assert "trainer.max_epochs=None   " in text
    assert (
        "trainer.log_every_n_steps=50   PositiveInt | None\n      steps between two logs of step"
        " values." in text
    )
    assert "conf           one of bert, dpo, gpt, gpt_124m, " in text
    assert "trainer.callbacks" not in text


def test_every_argument_is_documented() -> None:
    """The docstring has an entry for each argument of the Trainer, and the reader finds it."""
    arguments = arguments_of("trainkit.trainer.Trainer")
    assert len(arguments) > 40
    assert [argument.name for argument in arguments if not argument.text or not argument.kind] == []


def test_a_source_that_cannot_be_read_has_no_arguments() -> None:
    """A class of C, or a function, has none to list."""
    assert arguments_of("collections.OrderedDict") == []
    assert arguments_of("trainkit.cli.run.main") == []


def test_the_version_is_printed() -> None:
    """Without a command, and without torch."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trainkit", "--version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"trainkit {__version__}\n")
    assert " torch\n" not in done.stderr


@pytest.mark.parametrize("command", ALL)
def test_each_command_explains_itself(command: str) -> None:
    """Usage, every option with type, default and meaning, examples;
    without torch, and into a pipe that closes early.
    """
    line = f"{shlex.quote(sys.executable)} -X importtime -m trainkit {command} --help"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: python -m trainkit {command}")
    for name, kind, default, text in ALL[command].options:
        (own,) = [
            row for row in done.stdout.splitlines() if row.startswith(f"  {name}") and text in row
        ]
        assert name.startswith("-") or (
            f"{name}={kind}" in own and f"(default: {default})" * bool(default) in own
        ), own
    assert f"examples:\n  python -m trainkit {command}" in done.stdout
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    "words", ["", "--help", "help", "data", "explain", "explain no-checkpoint"]
)
def test_a_list_into_a_pipe_that_is_closed_ends_in_silence(words: str) -> None:
    """As `| head` does; exit codes of a pipe's first program are seldom looked at."""
    line = f"{shlex.quote(sys.executable)} -m trainkit {words} | true"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    "words", ["--help", "--version", "explain", "extensions", "jobs", "doctor --no-allreduce"]
)
def test_a_list_that_a_full_disk_does_not_take_is_one_error(words: str) -> None:
    """As `ls > /dev/full` says it; the code is that of a failure."""
    line = f"{shlex.quote(sys.executable)} -m trainkit {words} > /dev/full"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    full = "Error: the output cannot be written: No space left on device.\n"
    assert (done.stderr, done.returncode) == (full, 1)


def test_a_file_that_a_list_is_of_keeps_its_error() -> None:
    """Its own error is raised, not one of the output."""
    with pytest.raises(FileNotFoundError), read_in_part():
        raise FileNotFoundError(2, "No such file or directory", "a.yaml")


@pytest.mark.parametrize("words", ["explain", "data --help", "fit --help"])
def test_lists_leave_the_signals_of_this_process(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that calls a command has connections, whose ends are errors and no end of it."""
    monkeypatch.setattr(sys, "argv", ["trainkit", *words.split()])
    assert program() == 0
    assert capsys.readouterr().out
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN


def test_a_list_leaves_the_signals_of_other_threads() -> None:
    """One may write to a connection whose other end is closed: an error, and no end of all."""
    with read_in_part():
        assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN


def test_help_is_printed_in_any_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program of the user's may ask for it anywhere."""
    monkeypatch.setattr(sys, "argv", ["trainkit", "fit", "--help"])
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(program()))
    thread.start()
    thread.join()
    assert codes == [0] and capsys.readouterr().out


def test_help_without_an_output_ends_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has no sys.stdout if the program that starts it has closed it."""
    monkeypatch.setattr(sys, "argv", ["trainkit", "--help"])
    monkeypatch.setattr(sys, "stdout", None)
    assert program() == 0


@pytest.mark.parametrize("words", ["launch -np 2 -- python train.py -h", "launch -np 2 x --help"])
def test_help_of_a_program_that_is_launched_is_its_own(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher has connections: by SIGPIPE it would end in silence before its ranks."""
    handlers: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["trainkit", *words.split()])

    def note(*words: Any) -> int:
        handlers.append(signal.getsignal(signal.SIGPIPE))
        return 0

    monkeypatch.setattr("trainkit.extensions.elastic.launch.main", note)
    assert program() == 0
    assert handlers == [signal.SIG_IGN]


def test_what_may_be_left_out_is_not_called_required() -> None:
    """An option in brackets in the usage has a default."""
    for command, usage in ALL.items():
        for name, _, default, _ in usage.options:
            assert default or f"[{name}=" not in usage.line, (command, name)


def test_the_options_are_those_that_a_command_takes() -> None:
    """Those of commands that split off their own from a config's,
    and of keys at the top of a config.
    """
    for command, own in (
        ("plan", plan._OWN),
        ("data check", data_command._OWN),
        ("scaling", (*scaling._OWN, "run_dir")),  # the last of a script alone
        ("check-resume", check_resume._OWN),
        ("check-engine", check_engine._OWN),
    ):
        assert set(ALL[command].keys()) == set(own)
    assert set(ALL["export"].options[2][1].split(" | ")) == set(FORMATS)
    base = (shipped_root() / "conf" / "_base.yaml").read_text()
    for command in ("fit", "validate", "test", "predict"):
        for name in ALL[command].keys().keys() - {"trust", "table", "strict"}:
            assert re.search(rf"^{name}:", base, re.MULTILINE), name


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["fitt"], ["Error: 'fitt' is not a command. Did you mean 'fit'?", "Commands: fit, "]),
        (["fit", "mpl"], ["Error: 'mpl' is not a setting", "Did you mean 'mlp'?"]),
        (["fit", "fitt"], ["Error: 'fitt' is not a setting", "conf=NAME: bert, "]),
        (["doctor", "x"], ["Error: x is not understood.", "doctor takes --json, --no-allreduce"]),
    ],
)
def test_an_unknown_word_is_answered_in_two_lines(
    typed: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What was given and what is legal, not a page of help."""
    assert command_line(typed) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2
    assert said[0] in lines[0] and said[1] in lines[1]
