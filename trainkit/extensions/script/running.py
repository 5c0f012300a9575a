"""Runs a user's script up to its fit, in this process, as `python mine.py` would.

The fit is handed to a function in place of being trained, or is trained with changes. The script
ends there: what follows its first fit is not run.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainkit.errors import ConfigError, Dismissed, Preempted, TrainkitError
from trainkit.extensions.script.command_line import Script
from trainkit.run.around_fit import IN_FORCE, AroundFit, RequestedFit
from trainkit.run.build import StartFrom
from trainkit.safety.tracebacks import text_of

Train = Callable[[StartFrom], None]
_PACKAGE = str(Path(__file__).parents[2])


class _ScriptEndsHere(BaseException):
    """Ends a script at its fit; not an Exception, which a script may catch."""


class FirstFit(AroundFit):
    """Passes the script's first fit to a function, and ends the script then.

    Args:
        script: that is run.
        look: is called with the fit and a function that trains it.
        change: returns the Trainer's arguments in place of the given ones.
    """

    def __init__(
        self,
        script: Script,
        look: Callable[[RequestedFit, Train], None],
        change: Callable[[dict[str, Any]], dict[str, Any]] = lambda given: given,
    ) -> None:
        self._script = script
        self._look = look
        self._change = change
        self._built_at: list[int] | None = None
        self.is_reached = False
        self.error: BaseException | None = None

    def settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """Note where the Trainer is constructed.

        Raises:
            ConfigError: the script has constructed one before.
        """
        lines = _lines_of_script(self._script)
        if self._built_at is not None:
            first, second = _parting(self._built_at, lines)
            self.error = ConfigError(
                f"{self._script.name} constructs two Trainers or Loops, in line {first} and in line"
                f" {second}, so it is not known which one is meant. Construct the second one"
                " after the fit of the first, which is the one looked at, or move it to a script"
                " of its own."
            )
            raise _ScriptEndsHere
        self._built_at = lines
        return self._change(given)

    def fit(self, requested: RequestedFit, train: Train) -> None:
        """Look at the fit, and end the script."""
        self.is_reached = True
        try:
            self._look(requested, train)
        except (Preempted, Dismissed, KeyboardInterrupt):
            raise
        except BaseException as error:  # a script's own `except` must not hide it
            self.error = error
        raise _ScriptEndsHere

    @property
    def constructed(self) -> bool:
        """Whether the script has constructed a Trainer or a Loop."""
        return self._built_at is not None


def run_script(script: Script, around: FirstFit) -> None:
    """Run the script, with its arguments and its folder first in the import path.

    Raises:
        ConfigError: it is not Python, ends before it fits, or with an error.
    """
    with _as_main(script), _put_around(around):
        try:
            runpy.run_path(script.path, run_name="__main__")
        except _ScriptEndsHere:
            pass
        except (Preempted, Dismissed, KeyboardInterrupt):
            raise
        except SystemExit as ended:
            _refuse_exit(script, ended, around)
        except TrainkitError as error:
            if not around.is_reached:
                _name_line(script, error)
            raise
        except Exception as error:
            if not around.is_reached:
                raise ConfigError(_text_of(script, error)) from None
            raise
    if around.error is not None:
        raise around.error
    if not around.is_reached:
        raise ConfigError(_never_fits(script, around))


@contextlib.contextmanager
def _as_main(script: Script) -> Iterator[None]:
    """Give the script its arguments and import path; the first entry of `python -m` is left out."""
    arguments = sys.argv
    paths = list(sys.path)
    sys.argv = [script.path, *script.arguments]
    folder = str(Path(script.path).resolve().parent)
    sys.path[:] = [folder, *(path for path in paths if path not in ("", str(Path.cwd()), folder))]
    try:
        yield
    finally:
        sys.argv = arguments
        sys.path[:] = paths


def _refuse_exit(script: Script, ended: SystemExit, around: FirstFit) -> None:
    if around.is_reached:
        return
    line = _last_line(script, ended)
    call = "sys.exit()" if ended.code is None else f"sys.exit({ended.code!r})"
    raise ConfigError(
        f"{script.name} ended in line {line} with {call}, before it called fit. Arguments of the"
        f" script stand after it: {script.path} --its-option value."
    ) from None


def _never_fits(script: Script, around: FirstFit) -> str:
    if around.constructed:
        return (
            f"{script.name} constructs a Trainer or a Loop, and never calls fit (of a Loop: never"
            " enters `with loop:`). Call trainer.fit(task, loader) in the script itself, or below"
            ' `if __name__ == "__main__":`.'
        )
    return (
        f"{script.name} ended without a fit: it constructs no trainkit.Trainer and no"
        " trainkit.Loop. With the loop in your own hands write `with trainkit.Loop(model,"
        " optimizer, loader, max_epochs=3) as loop:` (docs/tutorial_script.md); with a Task call"
        " trainkit.Trainer(...).fit(task, loader)."
    )


def _text_of(script: Script, error: Exception) -> str:
    """Return the text of an error of the script: a line that is not Python, or a traceback."""
    not_python = isinstance(error, SyntaxError) and error.filename in (
        script.path,
        str(Path(script.path).resolve()),
        None,
    )
    if isinstance(error, SyntaxError) and not_python:
        return f"{script.path} is not Python: line {error.lineno}: {error.msg}."
    if isinstance(error, (UnicodeDecodeError, ValueError)) and _frames(script, error) == []:
        return f"{script.path} is not Python: {error}."
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename != script.path:
        step = step.tb_next
    text = text_of(error.with_traceback(step))
    return f"{script.name} ended with an error before it called fit.\n{text}"


def _name_line(script: Script, error: TrainkitError) -> None:
    line = _last_line(script, error)
    if line and error.args:
        error.args = (f"{error.args[0]} ({script.name}, line {line})", *error.args[1:])


def _frames(script: Script, error: BaseException) -> list[traceback.FrameSummary]:
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == script.path
    ]


def _last_line(script: Script, error: BaseException) -> int | None:
    frames = _frames(script, error)
    return frames[-1].lineno if frames else None


def _lines_of_script(script: Script) -> list[int]:
    """Return the script's lines that are being run, the outermost call first."""
    stack = traceback.extract_stack()
    return [frame.lineno or 0 for frame in stack if frame.filename == script.path]


def _parting(first: list[int], second: list[int]) -> tuple[int, int]:
    """Return the lines from which two calls in the script went apart."""
    pairs = list(zip(first, second, strict=False))
    return next((pair for pair in pairs if pair[0] != pair[1]), (first[-1], second[-1]))


@contextlib.contextmanager
def _put_around(around: AroundFit) -> Iterator[None]:
    """Put it around the fits of all Trainers that are constructed within the context."""
    token = IN_FORCE.set(around)
    try:
        yield
    finally:
        IN_FORCE.reset(token)
