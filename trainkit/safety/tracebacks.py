"""An error of the user's code as text: the user's frames, and those of trainkit in front of them in
one line.

`TRAINKIT_TRACEBACK=full` shows all frames, as Python does. Frames after the user's last are shown,
too: the error is there.
"""

from __future__ import annotations

import itertools
import os
import sysconfig
import traceback
from pathlib import Path
from typing import Any

FULL = "TRAINKIT_TRACEBACK"
_OURS = str(Path(__file__).parent.parent) + os.sep
_INSTALLED = (
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    "<frozen ",
)


def text_of(error: BaseException) -> str:
    """Return an error with its traceback, and with those of its causes."""
    whole = traceback.TracebackException.from_exception(error)
    if os.environ.get(FULL) != "full":
        _fold(whole)
    return "".join(whole.format()).rstrip("\n")


def _fold(one: traceback.TracebackException) -> None:
    one.stack = _Folded(one.stack)
    # groups: Python 3.11
    others = [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]
    for other in others:
        if other is not None:
            _fold(other)


class _Folded(traceback.StackSummary):
    """A stack whose frames of trainkit, before the user's last one, are a line."""

    def format(self, **given: Any) -> list[str]:
        """Return the lines; Python 3.13 gives `colorize`."""
        last = max((i for i, frame in enumerate(self) if _is_users(frame.filename)), default=0)
        lines = []
        for ours, group in itertools.groupby(
            self[:last], lambda frame: frame.filename.startswith(_OURS)
        ):
            frames = list(group)
            if ours:
                lines.append(
                    f"  ({len(frames)} frame{'s' * (len(frames) > 1)} of trainkit; {FULL}=full"
                    " shows them)\n"
                )
            else:
                lines += traceback.StackSummary.from_list(frames).format(**given)
        return lines + traceback.StackSummary.from_list(self[last:]).format(**given)


def _is_users(file: str) -> bool:
    return not file.startswith((_OURS, *_INSTALLED))
