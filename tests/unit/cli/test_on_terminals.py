"""Commands on a terminal of 60 columns: lines break between words, not in the middle of one."""

from __future__ import annotations

import io

import pytest
from rich.text import Text

from trainkit.cli import extensions
from trainkit.cli.guard import fail
from trainkit.console import console_of
from trainkit.errors import ConfigError
from trainkit.extension import Finding
from trainkit.extensions.doctor import command as doctor
from trainkit.launch.environment import read_launcher

LONG = "a sentence of many short words that no terminal of sixty columns can show on one line"


class Screen(io.StringIO):
    """A terminal of 60 columns."""

    def isatty(self) -> bool:
        """Return true."""
        return True

    def lines(self) -> list[str]:
        """Return what it shows, line by line, without colours."""
        return Text.from_ansi(self.getvalue()).plain.splitlines()


def shown_on(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Return a terminal in place of stdout and stderr; pytest has its own until a test begins."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Screen()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    return terminal


def test_the_list_of_extensions_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is longer only if one name is."""
    screen = shown_on(monkeypatch)
    assert extensions.main("extensions", []) == 0
    assert len(screen.lines()) > 40
    assert [line for line in screen.lines() if len(line) > 60 and len(line.split()) > 1] == []


def test_the_doctors_findings_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are well, and what is wrong."""
    screen = shown_on(monkeypatch)
    finding = Finding("host", "memory", LONG, "wrong", f"{LONG}.", "")
    console = console_of()
    doctor._show(console, finding, is_first=False)
    doctor._conclude(console, [finding])
    assert len(screen.lines()) > 5 and max(map(len, screen.lines())) <= 60


def test_an_error_fits_but_for_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that explains it can be copied."""
    screen = shown_on(monkeypatch)
    text = f"ckpt_path is 'last', and runs/a has no complete 'last'; {LONG}."
    fail(ConfigError(text), read_launcher({}), text, 2)
    *lines, command = screen.lines()
    assert command == "More: python -m trainkit explain no-checkpoint"
    assert len(lines) == 3 and max(map(len, lines)) <= 60
    assert " ".join(lines) == f"Error: {text}"
