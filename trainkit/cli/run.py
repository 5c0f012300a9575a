"""fit, validate, test, predict: compose and check (no torch yet), build, run, and end with an exit code.

0  done          1  the run failed          2  a mistake in what was asked for; nothing was written
75  a signal ended the run, and a checkpoint is there to go on from
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainkit.config.resources import conf_folders, make_importable
from trainkit.errors import JobEnded, Preempted, TrainkitError
from trainkit.launch.environment import Launcher, read_launcher

# How long another rank waits before it prints an error. When rank 0 has the same one, it has printed it by then and
# the launcher ends everybody; when it has not, this rank's message is the one that the user needs.
_RANK_0_FIRST_S = 2.0


def main(
    command: str, arguments: Sequence[str], work: Callable[[Any], None] | None = None, launcher: Launcher | None = None
) -> int:
    """Run `command` with Hydra's overrides and flags; return the exit code.

    Args:
        command: "fit", "validate", "test" or "predict".
        arguments: of the command line.
        work: is done with each job in place of the command.
        launcher: whose rank this is, where the environment pretends another.
    """
    make_importable(Path.cwd())
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # torch's profiler, once torch is imported, tells of its own affairs
    launcher = launcher or read_launcher()
    if "-h" in arguments or "--help" in arguments:
        if launcher.is_main:
            _print_help(command)
        return 0
    try:
        # Hydra is imported here, so that --help costs nothing.
        config = importlib.import_module("trainkit.config.compose")
        config.run(command, arguments, launcher.is_main, work or _work)
        return 0
    except Preempted as ended:
        return ended.exit_code
    except KeyboardInterrupt:
        return 130
    except JobEnded as error:
        return fail(error, launcher, "" if error.is_told else str(error), error.exit_code)
    except TrainkitError as error:
        return fail(error, launcher, str(error), error.exit_code)
    except Exception as error:
        return fail(error, launcher, traceback.format_exc(), 1)


def _work(job: Any) -> None:
    """Run one job. torch is imported here, after all checks."""
    execute = importlib.import_module("trainkit.cli.execute")
    execute.execute(job)


def guarded(work: Callable[[], object], launcher: Launcher) -> int:
    """Do a command's work; return its exit code, with what went wrong told as `fail` tells it."""
    try:
        work()
        return 0
    except KeyboardInterrupt:
        return 130
    except TrainkitError as error:
        return fail(error, launcher, str(error), error.exit_code)
    except Exception as error:
        return fail(error, launcher, traceback.format_exc(), 1)


def fail(error: BaseException, launcher: Launcher, text: str, code: int) -> int:
    """Print an error once, where there is a text, and make sure that this process ends and takes the job with it."""
    if launcher.name == "horovodrun":
        launcher = read_launcher()  # in an elastic job the rank is another one than at the start
    if launcher.world_size == 1:
        _let_go(error)
        print(f"Error: {text}" if isinstance(error, TrainkitError) else text, file=sys.stderr)
        return code
    if not launcher.is_main:
        time.sleep(_RANK_0_FIRST_S)
    if not text:
        os._exit(code)
    host = os.environ.get("HOROVOD_HOSTNAME", "")
    where = f"rank {launcher.rank}{f' on {host}' * bool(host)}"
    print(f"Error on {where}: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)  # not sys.exit: the frameworks' own exit handlers would wait for the other ranks


def _let_go(error: BaseException | None) -> None:
    """Drop what the error's frames hold: loader workers end now, and not noisily when the interpreter does."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()


def _print_help(command: str) -> None:
    config = importlib.import_module("trainkit.config.compose")
    folders = conf_folders(Path.cwd())
    print(f"usage: python -m trainkit {command} conf=NAME [key=value ...] [--cfg job] [-m]\n")
    print(f"  conf      one of {', '.join(config.list_confs(folders))}")
    for group in sorted({p.name for folder in folders for p in folder.iterdir() if p.is_dir()}):
        names = sorted({p.stem for folder in folders for p in (folder / group).glob("*.yaml")})
        print(f"  {group:<10}{', '.join(names)}")
    print(f"\nAll settings of a config and their values: python -m trainkit {command} conf=NAME --cfg job")
