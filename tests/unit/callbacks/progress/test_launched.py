"""The bar of a launched rank: what it writes to the launcher's terminal, and what to stdout."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from tests.helpers.terminal import drawn
from trainkit.callbacks.progress.launched import LaunchedBar


@dataclass
class Screen:
    """Takes the place of a Terminal of 80 columns."""

    is_in_front: bool = True
    width: int = 80
    written: list[str] = field(default_factory=list)
    seen: threading.Event = field(default_factory=threading.Event)

    def write(self, text: str) -> None:
        """Keep a text."""
        self.written.append(text)
        self.seen.set()

    def close(self) -> None:
        """Do nothing."""


def bar_on(screen: Screen) -> LaunchedBar:
    """Return a bar that has begun an epoch, and is at its third step."""
    bar = LaunchedBar(screen, refresh_rate=100.0)  # type: ignore[arg-type]
    bar.begin("epoch 1/2  step", 8)
    bar.moved(3, "5 samples/s", ["train/loss 0.5"])
    return bar


def test_the_cursor_rests_above_the_bar() -> None:
    """Each frame clears the last one, leaves a line empty for others, draws one line of bar,
    and goes back up.
    """
    screen = Screen()
    bar = bar_on(screen)
    assert screen.seen.wait(10)
    bar.close()
    for frame in screen.written[:-1]:
        assert frame.startswith("\r\x1b[J\nepoch")
        assert frame.endswith("\r\x1b[1A") and frame.count("\n") == 1
        assert all(len(line) < 80 for line in drawn(frame))
    assert "3/8" in screen.written[-2]
    assert screen.written[-1] == "\r\x1b[J", "the bar is taken away"


def test_epochs_are_a_table_above_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    """A header once, and a row for each; nothing is printed twice."""
    screen = Screen()
    bar = bar_on(screen)
    for epoch in ("epoch 1/2", "epoch 2/2"):
        bar.epoch(epoch, {"val/loss": 0.25}, "5 samples/s", 1.5)
    bar.say("Stopped: [enough].")
    bar.close()
    lines = [
        line.split("\r")[0]
        for line in drawn("".join(screen.written))
        if "step" not in line and line.strip()
    ]
    assert [line.split() for line in lines] == [
        ["val/loss", "rate", "time"],
        ["epoch", "1/2", "0.25", "5", "samples/s", "1.5", "s"],
        ["epoch", "2/2", "0.25", "5", "samples/s", "1.5", "s"],
        ["Stopped:", "[enough]."],
    ]
    assert capsys.readouterr().out == ""


def test_in_the_background_there_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is drawn; epochs and messages are printed for the launcher to pass on."""
    screen = Screen(is_in_front=False)
    bar = bar_on(screen)
    bar.epoch("epoch 1/2", {"val/loss": 0.25}, "5 samples/s", 1.5)
    bar.say("Stopped: enough.")
    bar.end()
    bar.close()
    assert screen.written == []
    assert (
        capsys.readouterr().out
        == "epoch 1/2  val/loss 0.25  5 samples/s  1.5 s\nStopped: enough.\n"
    )


def test_a_validation_takes_the_bars_place() -> None:
    """The innermost work is shown, and the outer one again after it."""
    screen = Screen()
    bar = bar_on(screen)
    names = []
    for change in (lambda: bar.begin("validating", 4), bar.end):
        change()
        bar.say("now")
        names.append(drawn(screen.written[-1])[2].split()[0])
    bar.close()
    assert names == ["validating", "epoch"]
