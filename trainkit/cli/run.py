"""fit, validate, test, predict: compose and check (without torch), build, run, and end with an exit code.

0  done          1  the run failed          2  illegal request; nothing was written
75  a signal ended the run, and a checkpoint for resuming exists
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainkit.cli.reported import is_first
from trainkit.cli.usage import usage_of
from trainkit.config import documentation
from trainkit.config.resources import conf_folders, make_importable
from trainkit.console import Output
from trainkit.errors import JobEnded, Preempted, TrainkitError
from trainkit.launch.environment import Launcher, read_launcher

# How long another rank waits before it prints an error. If rank 0 has one too, it has mostly printed it by then, and the
# launcher ends all ranks; otherwise this rank's message is the one that the user needs.
_RANK_0_FIRST_S = 2.0


def main(
    command: str, arguments: Sequence[str], work: Callable[[Any], None] | None = None, launcher: Launcher | None = None
) -> int:
    """Run `command` with Hydra's overrides and flags; return the exit code.

    Args:
        command: "fit", "validate", "test" or "predict".
        arguments: command line arguments.
        work: function called with each job instead of the command.
        launcher: this process's launcher, if the environment simulates another.
    """
    make_importable(Path.cwd())
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # silences torch's profiler library
    launcher = launcher or read_launcher()
    if "-h" in arguments or "--help" in arguments:
        if launcher.is_main:
            _print_help(command)
        return 0
    is_main = launcher.is_main

    def run() -> None:
        # Hydra is imported here, so that --help costs nothing.
        config = importlib.import_module("trainkit.config.compose")
        is_training = command == "fit" and work is None  # of several fits a table is printed
        config.run(command, arguments, is_main, work or _work, _show_sweep if is_training else None)

    return guarded(run, launcher)


def main_alone(arguments: Sequence[str], usage: str, work: Callable[[], object]) -> int:
    """Run a command without Hydra on rank 0; return the exit code."""
    launcher = read_launcher()
    if not launcher.is_main:
        return 0
    if "-h" in arguments or "--help" in arguments:
        print(usage)
        return 0
    make_importable(Path.cwd())
    return guarded(work, launcher)


def _work(job: Any) -> Any:
    """Run one job; return the latest logged values. torch is imported here, after all checks."""
    return importlib.import_module("trainkit.cli.execute").execute(job)


def _show_sweep(sweep: Any) -> None:
    importlib.import_module("trainkit.cli.runs").show_sweep(sweep)


def guarded(work: Callable[[], object], launcher: Launcher) -> int:
    """Call `work`; return the exit code, with errors reported by `fail`. Output that cannot be written ends nothing."""
    with Output():
        return _guarded(work, launcher)


def _guarded(work: Callable[[], object], launcher: Launcher) -> int:
    try:
        work()
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


def fail(error: BaseException, launcher: Launcher, text: str, code: int) -> int:
    """Print an error once, if there is a text, and make sure that this process ends, and with it the job."""
    if launcher.name == "horovodrun":
        launcher = read_launcher()  # in an elastic job the rank may have changed
    if launcher.world_size == 1:
        _release(error)
        print(f"Error: {text}" if isinstance(error, TrainkitError) else text, file=sys.stderr)
        return code
    if not launcher.is_main:
        time.sleep(_RANK_0_FIRST_S)
    if not text or not is_first(text):
        os._exit(code)
    host = os.environ.get("HOROVOD_HOSTNAME", "")
    where = f"rank {launcher.rank}{f' on {host}' * bool(host)}"
    print(f"Error on {where}: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)  # not sys.exit: the frameworks' own exit handlers would wait for the other ranks


def _release(error: BaseException | None) -> None:
    """Release the objects held by the error's frames, so that loader workers end now, quietly, and not at interpreter exit."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()


def _print_help(command: str) -> None:
    config = importlib.import_module("trainkit.config.command_line")
    folders = conf_folders(Path.cwd())
    print(f"{usage_of(command)}\nConfigs, and their groups:\n")
    print(f"  conf      one of {', '.join(config.list_confs(folders))}")
    for group in sorted({p.name for folder in folders for p in folder.iterdir() if p.is_dir()}):
        names = sorted({p.stem for folder in folders for p in (folder / group).glob("*.yaml")})
        print(f"  {group:<10}{', '.join(names)}")
    print("\nSettings of the Trainer:\n")
    for argument in documentation.arguments_of("trainkit.trainer.Trainer"):
        if argument.name not in ("callbacks", "engine", "logger", "run_dir", "seed"):  # groups, and keys at the top
            print(f"  trainer.{argument.name}={argument.default}   {argument.kind}")
            print(textwrap.indent(textwrap.fill(argument.text, 100), " " * 6))
    print(f"\nPrint all settings of a config: python -m trainkit {command} conf=NAME --cfg job")
