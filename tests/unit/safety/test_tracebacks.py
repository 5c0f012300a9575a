"""A traceback of the user's code:
the user's own frames, and those of trainkit in front of them as a line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.cli.guard import guarded
from trainkit.launch.environment import read_launcher
from trainkit.safety.tracebacks import text_of


class Wrong(Line):
    """Fails in its step, two calls deep, because of another error."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(batch)

    def loss_of(self, batch: Any) -> Any:
        try:
            return batch["label"]
        except TypeError as error:
            raise KeyError("label") from error


@pytest.mark.parametrize(("shown", "has_all"), [("", False), ("full", True)])
def test_frames_of_trainkit_are_a_line(
    shown: str,
    has_all: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before the user's, in which the error is; TRAINKIT_TRACEBACK=full shows all.
    The cause is there in both.
    """
    monkeypatch.setenv("TRAINKIT_TRACEBACK", shown)
    assert (
        guarded(lambda: quiet(tmp_path, max_epochs=1).fit(Wrong(), loader()), read_launcher()) == 1
    )
    text = capsys.readouterr().err
    for own in (
        "return self.loss_of(batch)",
        'raise KeyError("label") from error',
        "The above exception was the direct cause",
    ):
        assert own in text
    assert (
        text.endswith("KeyError: 'label'\n")
        and text.count("Traceback (most recent call last)") == 2
    )
    assert ("trainkit/loop.py" in text) == has_all
    assert (" frames of trainkit; TRAINKIT_TRACEBACK=full shows them)" in text) != has_all


def test_after_the_users_last_frame_all_are_shown() -> None:
    """The error is there: here in trainkit, which a script calls with what only Python refuses."""
    try:
        text_of(3)  # type: ignore[arg-type]
    except AttributeError as error:
        text = text_of(error)
    assert (
        "traceback.TracebackException.from_exception(error)" in text
        and "frames of trainkit" not in text
    )
