"""The path from Trainer.fit to optimizer.step: seven frames in three files; the twelve files that
a reader of the page is sent to.
"""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from tests.helpers.toy import Line, loader, quiet

PACKAGE = Path(trainkit.__file__).parent
PAGE = PACKAGE.parent / "docs" / "how_it_works.md"
FILES = {
    name: int(lines)
    for name, lines in re.findall(
        r"^\| \[(\S+\.py)\]\S+ \| (\d+) \|", PAGE.read_text(), re.MULTILINE
    )
}
OF_RANKS = {"engine/reduce/reducer.py", "engine/horovod/engine.py"}  # one process sums nothing


class Watched(torch.optim.SGD):
    """Notes the package's frames that its step is called through."""

    frames: list[tuple[str, str]] = []  # noqa: RUF012 - one test uses it

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Step."""
        frame, found = sys._getframe(1), []
        while frame is not None:
            if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
                found.append(
                    (
                        Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix(),
                        frame.f_code.co_name,
                    )
                )
            frame = frame.f_back  # type: ignore[assignment]
        Watched.frames = found[::-1]
        return super().step(closure)


class Task(Line):
    """A Line under that optimizer."""

    def configure_optimizers(self) -> Any:
        """Return it."""
        return Watched(self.parameters(), lr=0.1)


def test_the_path_to_an_update_is_short(tmp_path: Path) -> None:
    """A reader follows a fit to the update through seven functions in three files."""
    quiet(tmp_path, max_steps=1).fit(Task(), loader(8))
    begin = Watched.frames.index(("trainer.py", "fit"))  # the check of its arguments is before it
    assert Watched.frames[begin:] == [
        ("trainer.py", "fit"),
        ("trainer.py", "_fit_once"),
        ("loop.py", "fit"),
        ("loop.py", "train_epoch"),
        ("loop.py", "_train_steps"),
        ("loop.py", "train_step"),
        ("engine/base.py", "step"),
    ]


def test_twelve_files_train(tmp_path: Path) -> None:
    """A fit calls each of the files that the page names, but those that sum over ranks."""
    called = set()

    def note(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            called.add(path.relative_to(PACKAGE).as_posix())

    trainer = quiet(tmp_path, max_steps=2, enable_checkpointing=True)
    threading.setprofile(note)  # a checkpoint is written by a thread
    sys.setprofile(note)
    try:
        trainer.fit(Line(), loader(8))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert len(FILES) == 12
    assert set(FILES) - called == OF_RANKS


def test_their_lines_are_those_of_the_page() -> None:
    """Within a tenth: a file that grows by more is read again, and the page says so."""
    for name, lines in FILES.items():
        assert len((PACKAGE / name).read_text().splitlines()) == pytest.approx(lines, rel=0.1), name
