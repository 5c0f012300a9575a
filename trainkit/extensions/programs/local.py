"""Starts a job of several ranks on this machine, to its end."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from trainkit.extensions.programs.commands import ended_by_signals, started
from trainkit.launch.environment import LAUNCHERS, without_launcher

Launcher = Literal["horovodrun", "torchrun"]
_OF_TORCH = ("ddp", "fsdp", "deepspeed")  # engines that torchrun starts, at one rank too


def launcher_of(engine: str) -> Launcher:
    """Return the launcher for an engine (as "auto", "horovod", "ddp");
    auto uses Horovod if it is installed.
    """
    return (
        "torchrun"
        if engine in _OF_TORCH or importlib.util.find_spec("horovod") is None
        else "horovodrun"
    )


def pretend(world_size: int, local_size: int, name: Launcher) -> None:
    """Set the variables of `name` in this process: it then counts as rank 0 of `world_size`."""
    for variable in os.environ.keys() - without_launcher(os.environ).keys():
        del os.environ[variable]
    if world_size > 1:
        _, sign, rank, size, local_rank, local = next(
            row for row in LAUNCHERS if row.launcher == name
        )
        os.environ |= {
            sign: "0",
            rank: "0",
            size: str(world_size),
            local_rank: "0",
            local: str(local_size),
        }


def start_with(launcher: Launcher, ranks: int, engine: str = "auto") -> list[str]:
    """Return the start of a command that runs a script, or `-m module`, with this Python on each of
    `ranks` ranks.

    It uses modules, not the scripts `horovodrun` and `torchrun`: on the PATH, these may belong to
    another environment.
    """
    if ranks == 1 and engine not in _OF_TORCH:
        return [sys.executable]
    if launcher == "torchrun":  # standalone: on a free port
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
    return [
        sys.executable,
        "-m",
        "horovod.runner.launch",
        "-np",
        str(ranks),
        "--gloo",
        sys.executable,
    ]


def run_job(
    command: Sequence[str], log: Path, env: Mapping[str, str], timeout_s: float | None = None
) -> int:
    """Run a job to its end with its output in `log`; return its exit code.
    Everything that it started has ended then.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout_s`, and was ended.
    """
    with (
        ended_by_signals(),
        log.open("wb") as out,
        started(command, out, env) as process,
    ):
        return process.wait(timeout_s)
