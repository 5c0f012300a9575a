"""Streams that may be lost."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from trainkit.console import Output, console_of, wrapped, wrapped_for


class Broken(io.StringIO):
    """Accepts some characters."""

    room = 10

    def write(self, text: str) -> int:
        """Write, or fail."""
        if self.tell() + len(text) > self.room:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_files_and_pipes_get_no_codes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CI and launchers set such variables for all processes;
    a table in a log would be full of them.
    """
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    console_of().print(Text("red", style="red"))
    with (tmp_path / "log").open("w") as file:
        console_of(file).print(Text("red", style="red"))
    assert capsys.readouterr().out == (tmp_path / "log").read_text() == "red\n"


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        """Return true."""
        return True


@pytest.mark.parametrize("value", ["", "1"])
def test_no_color_is_plain_text_on_a_terminal(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bold either; an empty NO_COLOR is none (no-color.org)."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", value)
    screen = Screen()
    console_of(screen).print(Text("red", style="bold red"))
    assert (screen.getvalue() == "red\n") == bool(value)
    assert ("\x1b[1;31mred" in screen.getvalue()) == (not value)


def test_texts_are_printed_as_they_are() -> None:
    """rich reads neither a list of a setting as a style nor `:x:` as a picture, in tables too."""
    file, table = io.StringIO(), Table("callbacks")
    table.add_row("[checkpoint,ema]")
    console_of(file).print("[a] :x:", table)
    assert file.getvalue().startswith("[a] :x:") and "[checkpoint,ema]" in file.getvalue()


def test_a_message_breaks_between_words_on_a_terminal() -> None:
    """But for a line with a command, which is copied; an indented line stays indented."""
    text = "one two three four\n  five six seven\nRun: python -m trainkit explain unknown"
    assert wrapped(text, 10).split("\n") == [
        "one two",
        "three four",
        "  five six",
        "  seven",
        "Run: python -m trainkit explain unknown",
    ]
    assert wrapped_for(io.StringIO(), "a " * 200) == "a " * 200
    assert max(map(len, wrapped_for(Screen(), "a " * 200).split("\n"))) <= 80


def test_a_failure_is_reported_once_on_the_other_stream_and_in_a_file(tmp_path: Path) -> None:
    """What comes after it is dropped without an error;
    the streams are the caller's again at the end.
    """
    out, err = Broken(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with Output() as output, Output() as inner:
            assert inner is output
            print("first")
            print("second, which is too long")
            print("third")
            inner.report_in(tmp_path / "logs" / "rank-0.txt")
        assert sys.stdout is out
    assert out.getvalue().startswith("first\n")
    assert err.getvalue().count("stdout cannot be written: [Errno 32] Broken pipe.") == 1
    assert (tmp_path / "logs/rank-0.txt").read_text().count("stdout cannot be written") == 1


def test_a_command_that_only_prints_ends_with_its_reader() -> None:
    """As `runs | head`: it ends at once, as done, and no message says so."""
    out, err = Broken(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        with pytest.raises(SystemExit) as ended, Output(is_product=True):
            print("first, which is too long")
            print("never", file=sys.stderr)
        assert sys.stdout is out
    assert ended.value.code == 0 and not err.getvalue()


def test_a_command_that_only_prints_fails_on_a_full_disk(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its table is all that it makes: one sentence, and the code of a failure."""
    with (
        Path("/dev/full").open("w") as full,
        contextlib.redirect_stdout(full),
        pytest.raises(SystemExit) as ended,
        Output(is_product=True),
    ):
        print("a table", flush=True)
    text = "Error: the output cannot be written: No space left on device."
    assert ended.value.code == text and not capsys.readouterr().err


def test_both_streams_may_be_lost(tmp_path: Path) -> None:
    """Nothing is raised, and the file has both."""
    out, err = Broken(), Broken()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), Output() as output:
        output.report_in(tmp_path / "rank-0.txt")
        print("x" * 20)
        print("y" * 20, file=sys.stderr)
    assert len((tmp_path / "rank-0.txt").read_text().splitlines()) == 2
