"""The path from Trainer.fit to optimizer.step: seven frames in three files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import trainkit
from tests.helpers.toy import Line, loader, quiet

PACKAGE = Path(trainkit.__file__).parent


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
