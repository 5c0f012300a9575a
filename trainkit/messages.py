"""The messages of a run, by logging.getLogger("trainkit"): INFO for what happens, WARNING for what a user should know to act.

They are printed, each at once, as long as the program has given that logger no handler; nothing is configured here. With one,
they are records of that logger. docs/logging.md says how to silence and to redirect them.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

LOGGER = logging.getLogger("trainkit")


def info(text: str) -> None:
    """Say what happens. Most callers do so on rank 0 alone."""
    _log(logging.INFO, text, "stdout")


def warning(text: str, stream: Literal["stdout", "stderr"] = "stdout") -> None:
    """Say what a user should know to act; it is printed on `stream`."""
    _log(logging.WARNING, text, stream)


def are_printed() -> bool:
    """Return whether messages are printed; else the handlers of the program receive them."""
    return not LOGGER.handlers


def is_shown(level: int) -> bool:
    """Return whether the program's level for the logger lets a message pass; INFO if it has set none."""
    return level >= (LOGGER.level or logging.INFO) and level > LOGGER.manager.disable


def _log(level: int, text: str, stream: str) -> None:
    if LOGGER.handlers:
        LOGGER.log(level, text, stacklevel=3)
    elif is_shown(level):
        print(text, file=getattr(sys, stream), flush=True)
