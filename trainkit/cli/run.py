"""fit, validate, test, predict:
compose and check (without torch), build, run, and end with an exit code (guard.py).
"""

from __future__ import annotations

import importlib
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainkit.cli.as_json import facts_printed, split_json
from trainkit.cli.commands import command_of
from trainkit.cli.guard import guarded
from trainkit.cli.usage import usage_of
from trainkit.config import documentation
from trainkit.config.resources import conf_folders, make_importable
from trainkit.extension import resolve
from trainkit.launch.environment import Launcher, read_launcher

_EVALUATIONS = ("validate", "test")  # which print values, as --json does


def main(
    command: str,
    arguments: Sequence[str],
    work: Callable[[Any], None] | None = None,
    launcher: Launcher | None = None,
) -> int:
    """Run `command` with Hydra's overrides and flags; return the exit code.

    Args:
        command: "fit", "validate", "test" or "predict".
        arguments: command line arguments.
        work: function called with each job instead of the command.
        launcher: this process's launcher, if the environment simulates another.
    """
    make_importable()
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # silences torch's profiler library
    launcher = launcher or read_launcher()
    as_json = False
    if command in _EVALUATIONS and work is None:
        arguments, as_json = split_json(arguments)
    if "-h" in arguments or "--help" in arguments:
        if launcher.is_main:
            _print_help(command)
        return 0
    is_main = launcher.is_main
    codes = [0]

    def own_work(job: Any) -> Any:
        launchers = importlib.import_module("trainkit.config.launchers")
        if not launchers.starts_ranks(job.config):
            values = _work(job)
            if launcher.is_main:
                facts.update({"run_dir": str(job.config["run_dir"]), "metrics": values})
            return values
        codes.append(launchers.launch(job.config, [job.command, *arguments]))
        return None

    def run() -> None:
        # Hydra is imported here, so that --help costs nothing.
        config = importlib.import_module("trainkit.config.compose")
        is_training = command == "fit" and work is None  # of several fits a table is printed
        config.run(
            command, arguments, is_main, work or own_work, _show_sweep if is_training else None
        )

    with facts_printed(as_json) as facts:
        return guarded(run, launcher) or codes[-1]


def _work(job: Any) -> Any:
    """Run one job; return the latest logged values. torch is imported here, after all checks."""
    return importlib.import_module("trainkit.cli.execute").execute(job)


def _show_sweep(sweep: Any) -> None:
    """Print the table of a sweep's runs: what the command `runs` says of its folder."""
    if (runs := command_of("runs")) is not None:  # of an extension
        resolve(runs.main)("runs", [str(sweep.folder)])


def _print_help(command: str) -> None:
    config = importlib.import_module("trainkit.config.command_line")
    folders = conf_folders(Path.cwd())
    print(f"{usage_of(command)}\nConfigs, and their groups:\n")
    print(f"  {'conf':<15}one of {', '.join(config.list_confs(folders))}")
    for group in sorted({p.name for folder in folders for p in folder.iterdir() if p.is_dir()}):
        names = sorted({p.stem for folder in folders for p in (folder / group).glob("*.yaml")})
        print(f"  {group:<15}{', '.join(names)}")
    print("\nSettings of the Trainer:\n")
    elsewhere = importlib.import_module("trainkit.config.schema").ELSEWHERE
    for argument in documentation.arguments_of("trainkit.trainer.Trainer"):
        if argument.name not in elsewhere:
            print(f"  trainer.{argument.name}={argument.default}   {argument.kind}")
            print(textwrap.indent(textwrap.fill(argument.text, 100), " " * 6))
    print(f"\nPrint all settings of a config: python -m trainkit {command} conf=NAME --cfg job")
