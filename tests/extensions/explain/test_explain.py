"""explain: the errors with a page of their own."""

from __future__ import annotations

import pytest

from trainkit.cli.explained import explained, name_of
from trainkit.cli.guard import fail
from trainkit.errors import ConfigError
from trainkit.extensions.explain.command import first_sentence, main
from trainkit.launch.environment import read_launcher


def test_a_message_names_its_part(capsys: pytest.CaptureFixture[str]) -> None:
    """The command's last line is what to type next; an error without a part has no such line."""
    text = "ckpt_path is 'last', and runs/a has no complete 'last'; there are no checkpoints there."
    assert name_of(text) == "no-checkpoint"
    assert fail(ConfigError(text), read_launcher({}), text, 2) == 2
    assert (
        capsys.readouterr().err
        == f"Error: {text}\nMore: python -m trainkit explain no-checkpoint\n"
    )
    fail(ConfigError("x is 3; it must be 4."), read_launcher({}), "x is 3; it must be 4.", 2)
    assert "More:" not in capsys.readouterr().err


def test_the_command_prints_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the pattern, which is for the program."""
    assert main("explain", ["no-loss"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no-loss\n\n`training_step` must return") and "<!--" not in out


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """A line each."""
    assert main("explain", []) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(explained()) and all(
        line.endswith(".") for line in lines
    )


@pytest.mark.parametrize("typed", [["no-los"], ["no-loss", "more"]])
def test_another_name_is_refused(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The known ones are listed."""
    assert main("explain", typed) == 2
    err = capsys.readouterr().err
    assert " is not the name of an error." in err and "unknown-setting" in err


def test_a_sentence_ends_at_its_period() -> None:
    """Not at the next line."""
    assert first_sentence("One line\nand more. Two.\n\nThree") == "One line and more."
