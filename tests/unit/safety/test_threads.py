"""threads.py: what becomes of an exception in a thread."""

from __future__ import annotations

import threading

import pytest

from trainkit.safety.threads import printed, start_thread

# pytest warns of each exception that the interpreter's hook for threads gets, which is what is
# tested here.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> list[threading.ExceptHookArgs]:
    """Exceptions that the interpreter prints as those of threads."""
    hooked: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", hooked.append)
    return hooked


def fail() -> None:
    """Raise."""
    raise KeyError("wanted")


def test_an_exception_is_printed_with_its_effect(
    hooked: list[threading.ExceptHookArgs], capsys: pytest.CaptureFixture[str]
) -> None:
    """The traceback as Python prints it, and a sentence on what no longer happens."""
    start_thread("bar", fail, printed("The bar is not drawn.")).join(5)
    assert [args.exc_type for args in hooked] == [KeyError] and hooked[0].thread is not None
    assert hooked[0].thread.name == "bar"
    assert (
        capsys.readouterr().err
        == "This is a mistake of trainkit in its thread 'bar'. The bar is not drawn.\n"
    )


def test_work_starts_again_and_a_repeated_exception_is_printed_once(
    hooked: list[threading.ExceptHookArgs], capsys: pytest.CaptureFixture[str]
) -> None:
    """Until the work returns; another exception is printed too."""
    errors: list[BaseException] = [KeyError("a"), KeyError("a"), SystemExit(3), KeyError("a")]

    def work() -> None:
        if errors:
            raise errors.pop(0)

    start_thread("beats", work, printed("It continues.", retry_s=0.0)).join(5)
    assert not errors
    assert [args.exc_type for args in hooked] == [KeyError, SystemExit, KeyError]
    assert capsys.readouterr().err.count("It continues.") == 3


def test_what_waits_for_a_thread_is_released(hooked: list[threading.ExceptHookArgs]) -> None:
    """`then` is called after the exception was printed,
    so that no caller waits for a thread that has ended.
    """
    ended: list[int] = []
    start_thread(
        "kill", fail, printed("It may still run.", then=lambda: ended.append(len(hooked)))
    ).join(5)
    assert ended == [1]


def test_an_exception_can_be_handed_to_another_thread(
    hooked: list[threading.ExceptHookArgs],
) -> None:
    """Which raises it later; then it is not printed here."""
    handed: list[BaseException] = []
    start_thread("writer", fail, handed.append).join(5)
    assert [type(error) for error in handed] == [KeyError] and not hooked


def test_without_stderr_nothing_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed stream does not keep `then` from being called."""
    ended = threading.Event()

    def refuse(args: object) -> None:
        raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(threading, "excepthook", refuse)
    start_thread("bar", fail, printed("The bar is not drawn.", then=ended.set)).join(5)
    assert ended.is_set()
