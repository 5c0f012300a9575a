"""Background: work in order, in a thread; a failure or an overflow affects only its own logger."""

from __future__ import annotations

import threading

import pytest

from trainkit.errors import ConfigError
from trainkit.loggers.background import Background


class Notes:
    """The calls made, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.flushed = self.got_on = 0
        self.gate = threading.Event()
        self.got_through = False

    def note(self, what: str) -> None:
        """Note it."""
        self.done.append(what)

    def flush(self) -> None:
        """Count."""
        self.flushed += 1

    def get_on(self) -> None:
        """Count."""
        self.got_on += 1

    def start(self, room: int = 100) -> Background:
        """Return a Background of this."""
        return Background("OwnLogger", self.flush, self.get_on, room)

    def hold(self, background: Background) -> None:
        """Let the thread wait until `gate` is set, and return when it does."""
        reached = threading.Event()

        def stand() -> None:
            reached.set()
            self.gate.wait(30)
            self.got_through = True

        background.put("waiting", stand)
        assert reached.wait(30)


def fail() -> None:
    """Fail as a disk does."""
    raise OSError(28, "No space left on device")


def test_work_is_done_in_order_in_one_thread_of_its_own() -> None:
    """Work runs in the order in which it was queued, in the logger's own thread."""
    notes, threads = Notes(), set[int]()
    background = notes.start()
    for i in range(5):
        assert background.put(
            "noting", lambda i=i: (notes.note(str(i)), threads.add(threading.get_ident()))
        )
    background.close(lambda: notes.note("last"), 30)
    assert notes.done == ["0", "1", "2", "3", "4", "last"]
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_it_flushes_where_nothing_waits() -> None:
    """It flushes only when the queue is empty: a slow logger sends several entries at once."""
    notes = Notes()
    background = notes.start()
    notes.hold(background)
    for _ in range(5):
        background.put("noting", lambda: notes.note("x"))
    notes.gate.set()
    assert background.settle(30)
    assert len(notes.done) == 5
    assert notes.flushed == 1
    background.close(lambda: None, 30)


def test_a_slow_reader_drops_and_reports_how_many_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A full queue drops work without blocking, and the end reports the number."""
    notes = Notes()
    background = notes.start(room=3)
    notes.hold(background)
    assert [background.put("noting", lambda: notes.note("x")) for _ in range(5)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    notes.gate.set()
    background.close(lambda: None, 30)
    assert len(notes.done) == 3
    assert background.dropped == 2
    assert (
        capsys.readouterr().out.count(
            "OwnLogger did not keep up: 2 entries were dropped (its queue holds 3)"
        )
        == 1
    )


def test_handing_over_never_waits() -> None:
    """Queueing does not block even if the queue is full,
    and closing waits for room no longer than its limit.
    """
    notes = Notes()
    background = notes.start(room=1)
    notes.hold(background)
    for _ in range(20):
        background.put("noting", lambda: notes.note("x"))
    background.close(lambda: None, 0.01)
    assert not notes.got_through
    notes.gate.set()


def test_the_first_failure_is_reported_and_ends_the_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The failed logger is named, with its action and the error;
    later work is skipped, except for closing.
    """
    notes = Notes()
    background = notes.start()
    background.put("writing step 3", fail)
    background.put("writing step 4", fail)
    background.put("writing step 5", lambda: notes.note("x"))
    assert background.settle(30)
    assert not background.put("writing step 6", lambda: notes.note("x"))
    background.close(lambda: notes.note("closed"), 30)
    assert notes.done == ["closed"]
    printed = capsys.readouterr().out
    assert (
        printed.count(
            "OwnLogger failed while writing step 3: OSError: [Errno 28] No space left on device"
        )
        == 1
    )
    assert printed.count("OwnLogger") == 2
    assert "OwnLogger logs nothing from here on; training continues." in printed


def test_a_failure_at_the_end_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure to close is reported: data may be lost."""
    notes = Notes()
    notes.start().close(fail, 30)
    assert "OwnLogger failed while closing: OSError" in capsys.readouterr().out


def test_a_mistake_in_the_settings_is_kept_for_the_main_thread(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error of trainkit's own is not printed here: it ends the run."""
    notes = Notes()
    background = notes.start()

    def wrong() -> None:
        raise ConfigError("own.key is 3.")

    background.put("opening", wrong)
    background.close(lambda: None, 30)
    assert str(background.mistake) == "own.key is 3."
    assert capsys.readouterr().out == ""


def test_an_end_that_does_not_come_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """After the time limit the remaining work is dropped and reported;
    the thread does nothing more when it returns.
    """
    notes = Notes()
    background = notes.start()
    notes.hold(background)
    background.put("noting", lambda: notes.note("x"))
    background.close(lambda: notes.note("closed"), 0.05)
    assert "OwnLogger did not finish within 0.05 s: it was still " in capsys.readouterr().out
    notes.gate.set()
    background._thread.join(30)
    assert not background._thread.is_alive()
    assert notes.done == []


def test_waiting_is_getting_on() -> None:
    """While the main thread waits for a disk, it counts progress for the watchdog."""
    notes = Notes()
    background = notes.start()
    notes.hold(background)
    assert not background.settle(0.01)
    assert notes.got_on == 1
    notes.gate.set()
    background.close(lambda: None, 30)


def test_a_full_queue_does_not_keep_the_end_waiting() -> None:
    """The time limit holds even if there is no room for the closing entry."""
    notes = Notes()
    background = notes.start(room=1)
    notes.hold(background)
    background.put("noting", lambda: notes.note("x"))
    assert not background.settle(0.01)
    background.close(lambda: notes.note("closed"), 0.01)
    notes.gate.set()
    background._thread.join(30)
    assert not background._thread.is_alive()
