"""The logger "trainkit": its messages are printed as they are,
unless the program silences or redirects them.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.table import Table

from tests.helpers.toy import Line, loader, quiet
from trainkit.api.alerts import alert
from trainkit.console import LOGGER, info, show_table, warning


class Collected(logging.Handler):
    """A handler of the user's program."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Collect a message with its level."""
        self.seen.append((record.levelname, record.getMessage()))


@pytest.fixture(autouse=True)
def _as_imported() -> Iterator[None]:
    """Each test begins, and ends, with the logger as after an import."""

    def reset() -> None:
        for handler in list(LOGGER.handlers):
            LOGGER.removeHandler(handler)
        LOGGER.setLevel(logging.NOTSET)
        LOGGER.propagate = True

    reset()
    yield
    reset()


@pytest.fixture
def collected() -> Collected:
    """The handler of a program that has configured the logger."""
    handler = Collected()
    LOGGER.setLevel(logging.INFO)
    LOGGER.addHandler(handler)
    return handler


def test_importing_configures_nothing() -> None:
    """No handler, no level; a program may configure the logger before or after."""
    code = (
        "import trainkit.console as m; print(m.LOGGER.handlers, m.LOGGER.level, m.LOGGER.propagate)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] 0 True\n"


def test_messages_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """A percent sign too; on the stream of their caller, as it is now;
    once, whatever handlers the root has.
    """
    root, above = logging.getLogger(), Collected()
    root.addHandler(above)
    try:
        info("100 % of %s")
        warning("look")
        warning("look here", "stderr")
    finally:
        root.removeHandler(above)
    assert capsys.readouterr() == ("100 % of %s\nlook\n", "look here\n") and above.seen == []


@pytest.mark.parametrize(("level", "left"), [(logging.WARNING, "look\n"), (logging.ERROR, "")])
def test_a_level_silences(level: int, left: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the user's, set before."""
    LOGGER.setLevel(level)
    info("news")
    show_table(Table("a"))
    warning("look")
    assert capsys.readouterr().out == left


def test_a_handler_of_the_program_takes_them(
    capsys: pytest.CaptureFixture[str], collected: Collected
) -> None:
    """Nothing is printed, and they reach the root; without it they are printed again."""
    info("news")
    warning("look", "stderr")
    assert collected.seen == [("INFO", "news"), ("WARNING", "look")] and capsys.readouterr() == (
        "",
        "",
    )
    assert LOGGER.propagate
    LOGGER.removeHandler(collected)
    info("again")
    assert capsys.readouterr().out == "again\n"
    LOGGER.addHandler(collected)
    info("taken")
    assert (
        collected.seen[-1] == ("INFO", "taken")
        and capsys.readouterr().out == ""
        and LOGGER.propagate
    )


def test_a_fit_is_silent_for_a_program_that_takes_its_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], collected: Collected
) -> None:
    """Banner, what hooks say and alerts: a record each, with its level."""
    trainer = quiet(tmp_path, enable_model_summary=True)
    trainer.fit(Line(), loader(8))
    trainer.run.say("said")
    alert(trainer.run, "slow", "rank 3 is slow")
    assert capsys.readouterr().out == ""
    assert collected.seen[-2:] == [("INFO", "said"), ("WARNING", "rank 3 is slow")]
    (banner,) = [text for level, text in collected.seen if text.startswith("engine")]
    assert "single, 1 rank" in banner and "\x1b" not in banner


def test_a_fit_prints_what_it_did_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same banner, for a program that has configured nothing."""
    quiet(tmp_path, enable_model_summary=True).fit(Line(), loader(8))
    assert capsys.readouterr().out.split()[:4] == ["engine", "single,", "1", "rank,"]
