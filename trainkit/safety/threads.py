"""The threads of trainkit. All are started here, by one rule: no exception ends a thread unseen.

    start_thread(name, work, on_error)      on_error decides what becomes of an exception of `work`:
        printed(effect)                         printed with its effect; the thread ends, or works again after retry_s
        a function                              hands it to another thread, which raises it

Imports no torch.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable

# Takes an exception; returns the seconds after which the work starts again, None to end the thread.
OnError = Callable[[BaseException], float | None]


def start_thread(
    name: str, work: Callable[[], object], on_error: OnError, *, daemon: bool = True
) -> threading.Thread:
    """Run `work` in a new thread, and give each exception that leaves it to `on_error`."""

    def run() -> None:
        while True:
            try:
                work()
                return
            except BaseException as error:
                pause_s = on_error(error)
            if pause_s is None:
                return
            time.sleep(pause_s)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread


def printed(
    effect: str, *, then: Callable[[], object] | None = None, retry_s: float | None = None
) -> OnError:
    """Return an `on_error` that prints the traceback on stderr, and its effect.

    Args:
        effect: sentences: what no longer happens, or that it happens again; what to do.
        then: called after an exception was printed.
        retry_s: seconds after which the work starts again; an exception that repeats is printed
            once. None: the thread ends.
    """
    last = ""

    def print_it(error: BaseException) -> float | None:
        nonlocal last
        if (what := repr(error)) != last:
            last = what
            with contextlib.suppress(OSError, ValueError):  # stderr is closed: its reader has ended
                threading.excepthook(
                    threading.ExceptHookArgs(
                        (type(error), error, error.__traceback__, threading.current_thread())
                    )
                )
                print(
                    f"This is a mistake of trainkit in its thread '{threading.current_thread().name}'. {effect}",
                    file=sys.stderr,
                    flush=True,
                )
        if then is not None:
            then()
        return retry_s

    return print_it
