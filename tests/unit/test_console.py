"""Streams that may be lost."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest
from rich.text import Text

from trainkit.console import Output, console_of, without_colors


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


def test_texts_of_rays_lose_their_colours() -> None:
    """As "ray::f()", in cyan."""
    assert without_colors("\x1b[36mray::f()\x1b[39m [1] \x1b[0mx") == "ray::f() [1] x"


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


def test_both_streams_may_be_lost(tmp_path: Path) -> None:
    """Nothing is raised, and the file has both."""
    out, err = Broken(), Broken()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), Output() as output:
        output.report_in(tmp_path / "rank-0.txt")
        print("x" * 20)
        print("y" * 20, file=sys.stderr)
    assert len((tmp_path / "rank-0.txt").read_text().splitlines()) == 2
