"""Exceptions of ranks that arrive at the driver, or say there what they were."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray")
from ray import cloudpickle

from trainkit.errors import EngineError
from trainkit.extensions.ray import call
from trainkit.extensions.ray.sent import sendable, without_colors


class TwoArguments(Exception):
    """Pickle makes it again with one argument: it can be pickled, and not unpickled."""

    def __init__(self, place: str, code: int) -> None:
        super().__init__(f"{place} failed with {code}")


class Holds(Exception):
    """Holds what cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.open = (item for item in text)


def test_an_exception_that_arrives_is_sent_as_it_is() -> None:
    """With its type, for the user's `except`."""
    error = KeyError("of rank 1")
    assert sendable(error) is error


@pytest.mark.parametrize(
    "error", [TwoArguments("disk", 5), Holds("disk failed with 5")], ids=["unpickled", "pickled"]
)
def test_another_says_what_it_was(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank, the type, the text, where it was raised, and how it could be sent."""
    monkeypatch.setenv("HOROVOD_RANK", "3")
    try:
        raise error
    except Exception as raised:
        sent = cloudpickle.loads(cloudpickle.dumps(sendable(raised)))
    assert isinstance(sent, EngineError)
    text = str(sent)
    assert text.startswith(
        f"Rank 3 raised {__name__}.{type(error).__name__}: disk failed with 5\nTraceback"
    )
    assert "test_another_says_what_it_was" in text and "to super().__init__()" in text


def fail() -> None:
    """Raise what cannot be unpickled."""
    raise TwoArguments("disk", 5)


def test_a_worker_of_an_elastic_job_leaves_what_the_driver_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file that its keeper sends on has the rank, the type and the text;
    the traceback is on stderr too.
    """
    (tmp_path / "call").write_bytes(cloudpickle.dumps((fail, (), {})))
    monkeypatch.setenv("TRAINKIT_CALL", str(tmp_path))
    monkeypatch.setenv("HOROVOD_RANK", "1")
    assert call.main() == 1
    end = cloudpickle.loads((tmp_path / "result").read_bytes())
    assert str(end["error"]).startswith(
        f"Rank 1 raised {__name__}.TwoArguments: disk failed with 5"
    )
    assert "TwoArguments: disk failed with 5" in capsys.readouterr().err


def test_texts_of_rays_lose_their_colours() -> None:
    """As "ray::f()", in cyan."""
    assert without_colors("\x1b[36mray::f()\x1b[39m [1] \x1b[0mx") == "ray::f() [1] x"
