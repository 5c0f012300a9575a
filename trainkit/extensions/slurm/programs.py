"""Slurm's programs: sbatch, squeue, sacct, sinfo, scancel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence

from trainkit.errors import ConfigError

_TIMEOUT_S = 120.0  # a program tries for long to reach a controller that is restarted


def run_program(
    name: str, arguments: Sequence[str], text: str = "", without: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a program of Slurm's with a text as its input, and the environment but for the variables
    `without`.

    Raises:
        ConfigError: it is not installed, or does not answer.
    """
    if shutil.which(name) is None:
        raise ConfigError(
            f"There is no {name} on this machine: it belongs to no Slurm cluster, or Slurm's"
            " programs are not on the PATH. Use a login node of the cluster. launcher=slurm"
            " launcher.dry_run=true prints the script without Slurm."
        )
    try:
        return subprocess.run(
            [name, *arguments],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
            env={key: value for key, value in os.environ.items() if key not in without},
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{name} did not answer within {_TIMEOUT_S:g} s: Slurm's controller cannot be reached"
            " (`scontrol ping`)."
        ) from None


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return a program's own message, on one line."""
    lines = [re.sub(r"^\w+: (?:error: |fatal: )?", "", line) for line in done.stderr.splitlines()]
    return (
        "; ".join(dict.fromkeys(line.strip().rstrip(".") for line in lines if line.strip()))
        or f"exit code {done.returncode}"
    )


def partitions() -> list[str]:
    """Return the names of the cluster's partitions, none if they cannot be read."""
    done = run_program("sinfo", ["--noheader", "--format=%R"])
    return sorted(set(done.stdout.split())) if done.returncode == 0 else []
