"""--help and --version: what there is to set, with types, defaults and docstrings, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trainkit.cli.run import main
from trainkit.config.documentation import arguments_of
from trainkit.version import __version__


def test_help_lists_the_trainers_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its type, its default and a sentence; groups are listed above."""
    assert main("fit", ["--help"]) == 0
    text = capsys.readouterr().out
    assert "trainer.max_epochs=None   " in text
    assert "trainer.log_every_n_steps=50   PositiveInt\n      steps between two logs of step values." in text
    assert "conf      one of gpt, mlp" in text
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
        [sys.executable, "-X", "importtime", "-m", "trainkit", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"trainkit {__version__}\n")
    assert " torch\n" not in done.stderr
