"""The end of a command: its exit code, and its error, printed once.

0  done          1  the run failed          2  illegal request; nothing was written
75  a signal ended the run, and a checkpoint for resuming exists (0 for the script of
launcher=slurm: note_requeue)
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence

from trainkit.cli.explained import name_of
from trainkit.config.resources import make_importable
from trainkit.console import visible, wrapped_for
from trainkit.errors import JobEnded, Preempted, TrainkitError
from trainkit.launch.environment import Launcher, read_launcher
from trainkit.launch.reported import print_once
from trainkit.launch.slurm.step import note_requeue
from trainkit.launch.terminal import output_of_rank
from trainkit.safety.tracebacks import text_of


def main_alone(
    arguments: Sequence[str], usage: str, work: Callable[[], object], only_prints: bool = False
) -> int:
    """Run a command without Hydra on rank 0; return the exit code.

    One that `only_prints` ends once its output has no reader (`| head`).
    """
    launcher = read_launcher()
    if not launcher.is_main:
        return 0
    if "-h" in arguments or "--help" in arguments:
        print(usage)
        return 0
    make_importable()
    return guarded(work, launcher, only_prints)


def guarded(work: Callable[[], object], launcher: Launcher, only_prints: bool = False) -> int:
    """Call `work`; return the exit code, with errors reported by `fail`.
    Output that cannot be written ends nothing, unless it is all.
    """
    with output_of_rank(only_prints):
        return _guarded(work, launcher)


def _guarded(work: Callable[[], object], launcher: Launcher) -> int:
    try:
        work()
        return 0
    except Preempted as ended:
        return note_requeue(ended.exit_code, launcher.is_main)
    except KeyboardInterrupt:
        return 130
    except JobEnded as error:
        return fail(error, launcher, "" if error.is_reported else str(error), error.exit_code)
    except TrainkitError as error:
        return fail(error, launcher, str(error), error.exit_code)
    except Exception as error:
        return fail(error, launcher, text_of(error), 1)


def fail(error: BaseException, launcher: Launcher, text: str, code: int) -> int:
    """Print an error once, if there is a text, and make sure that this process ends,
    and with it the job.
    """
    name = name_of(text)
    text = visible(text) + f"\nMore: python -m trainkit explain {name}" * (name is not None)
    if launcher.name in ("horovodrun", "launch"):
        launcher = read_launcher()  # in an elastic job the rank may have changed
    is_own = isinstance(error, TrainkitError)  # prose; any other has a traceback
    if launcher.world_size == 1:
        _release(error)
        print(wrapped_for(sys.stderr, f"Error: {text}") if is_own else text, file=sys.stderr)
        return code
    print_once(text, launcher, is_prose=is_own)
    sys.stdout.flush()
    os._exit(code)  # not sys.exit: the frameworks' own exit handlers would wait for the other ranks


def _release(error: BaseException | None) -> None:
    """Release the objects held by the error's frames, so that loader workers end now, quietly,
    and not at interpreter exit.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    with warnings.catch_warnings():
        # of files that the failed run has open: this closes them
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
