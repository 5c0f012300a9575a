"""An error of the user's code as text: the user's frames, and those of trainkit and of Python's
import in front of them in one line.

`TRAINKIT_TRACEBACK=full` shows all frames, as Python does. Frames after the user's last are shown,
too: the error is there. Of an error in a DataLoader's worker the worker's own frames are shown.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from trainkit import extension
from trainkit.errors import WORKERS_ERROR

FULL = "TRAINKIT_TRACEBACK"
_OURS = str(Path(__file__).parent.parent) + os.sep
_INSTALLED = (
    *{sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    "<frozen ",
)
_OURS_OR_IMPORT = (
    _OURS,
    "<frozen importlib",
    os.path.join(sysconfig.get_path("stdlib"), "importlib", ""),
)
_CALLS = ("_wrapped_call_impl", "_call_impl")  # of torch.nn.Module
_FRAME = re.compile(r'^  File "(.*)", line \d+.*\n(?:    .*\n)*', re.MULTILINE)


def text_of(error: BaseException) -> str:
    """Return an error with its traceback, and with those of its causes; of a module that is
    missing, what to do.
    """
    is_explained = str(error).startswith("There is no module")
    missing = error.name if isinstance(error, ModuleNotFoundError) and not is_explained else None
    advice = f"\n{_advice(missing)}" if missing else ""
    whole = traceback.TracebackException.from_exception(error)
    if os.environ.get(FULL) != "full":
        if workers := WORKERS_ERROR.match(str(error)):
            return _of_worker(workers[1], f"{workers[2]}\n")
        _fold(whole)
    return "".join(whole.format()).rstrip("\n") + advice


def _of_worker(where: str, text: str) -> str:
    """Return the error of a DataLoader's worker, which torch hands on as text, before its frames.

    Args:
        where: the worker.
        text: its traceback, after those of its causes.
    """
    *causes, last = re.split(r"^(?=Traceback \()", text, flags=re.MULTILINE)
    frames = list(_FRAME.finditer(last))
    end = frames[-1].end() if frames else 0
    shown = "".join(map(_users_frames, (*causes, last[:end]))).rstrip("\n")
    return f"{last[end:].strip()}\nIn {where} ({FULL}=full shows all frames):\n{shown}"


def _users_frames(text: str) -> str:
    """Leave out the frames before the user's last one that are not the user's."""
    users = [frame.start() for frame in _FRAME.finditer(text) if is_users(frame[1])]
    last = max(users, default=0)
    return _FRAME.sub(
        lambda frame: frame[0] if frame.start() in users or frame.start() >= last else "", text
    )


def _advice(name: str) -> str:
    """Say what to do for a module that is missing: where it is, if a folder here has it."""
    root = name.partition(".")[0]
    if root in sys.modules:
        file = getattr(sys.modules[root], "__file__", None) or "built in"
        return f"{root} is {file}, and has no {name}: look for another {root}, or correct the name."
    if text := extension.advice("modules", root):
        return f"There is no module {root}{text}"
    places = [*Path.cwd().glob(f"*/{root}.py"), *Path.cwd().glob(f"*/{root}/__init__.py")]
    if places:
        here = places[0].relative_to(Path.cwd())
        return f"It is {here}: set PYTHONPATH={here.parts[0]}, or run the command in that folder."
    return (
        f"There is no module {root} in this folder, in PYTHONPATH or in an installed package. If it"
        " is your own file, run the command in its folder, or set PYTHONPATH to that folder; else"
        " install the package that has it (pip install ...)."
    )


def _fold(one: traceback.TracebackException) -> None:
    one.stack = _Folded(one.stack)
    # groups: Python 3.11
    others = [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]
    for other in others:
        if other is not None:
            _fold(other)


class _Folded(traceback.StackSummary):
    """A stack whose frames of trainkit, before the user's last one, are a line; of torch's calls of
    modules, which are two frames each, the modules' own frames are left.
    """

    def format(self, **given: Any) -> list[str]:
        """Return the lines; Python 3.13 gives `colorize`."""
        last = max((i for i, frame in enumerate(self) if is_users(frame.filename)), default=0)
        lines = []
        for ours, group in itertools.groupby(
            self[:last], lambda frame: frame.filename.startswith(_OURS_OR_IMPORT)
        ):
            frames = list(group)
            if ours:
                lines.append(
                    f"  ({len(frames)} frame{'s' * (len(frames) > 1)} of trainkit; {FULL}=full"
                    " shows them)\n"
                )
            else:
                lines += _plain(frames, given)
        return lines + _plain(self[last:], given)


def _plain(frames: list[traceback.FrameSummary], given: dict[str, Any]) -> list[str]:
    shown = [frame for frame in frames[:-1] if frame.name not in _CALLS] + frames[-1:]
    return traceback.StackSummary.from_list(shown).format(**given)


def is_users(file: str) -> bool:
    """Return whether a frame's file is the user's: neither trainkit's nor an installed package's nor
    Python's own.
    """
    return not file.startswith((_OURS, *_INSTALLED))
