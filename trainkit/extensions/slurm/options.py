"""What a user sets for a job on Slurm, checked, and as sbatch's options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.arguments import show
from trainkit.errors import ConfigError

# that end a fit with a checkpoint (engine/signals.py), and that Slurm may send
SIGNALS = ("USR1", "TERM")
_OWN = {
    "array": (
        "a job is one run. For several runs submit several jobs, or sweep: -m"
        " hydra/launcher=submitit_slurm"
    ),
    "chdir": "the job starts in the folder in which it was submitted",
    "error": "the job's output is in its run's folder, under slurm/",
    "ntasks": "ranks are launcher.nodes times launcher.ntasks_per_node",
    "open_mode": "a requeued job appends to its output",
    "output": "the job's output is in its run's folder, under slurm/",
    "wrap": "the job runs the fit",
}
_TIMES = re.compile(r"(?:(?P<days>\d+)-)?(?P<numbers>\d+(?::\d+){0,2})")
_TIME_FORMS = (
    "'90:00' (minutes:seconds), '04:00:00', '2-12' (days-hours), '2-12:00:00' or UNLIMITED"
)


@dataclass(frozen=True)
class SlurmOptions:
    """Checked options.

    Attributes:
        directives: sbatch's options, as "--nodes=4", without those of every job.
        nodes, tasks: number of nodes, and of tasks on each: a task is a rank.
        signal: as "USR1@60".
        requeue: whether a job that was signalled is queued again.
        cpus_per_task: for srun, which does not take it from the job.
        setup: lines of shell before srun.
        srun_args: further words for srun.
        python: the interpreter, None for the one that submits.
    """

    directives: Sequence[str]
    nodes: int
    tasks: int
    signal: str
    requeue: bool = True
    cpus_per_task: int | None = None
    setup: Sequence[str] = field(default=())
    srun_args: Sequence[str] = field(default=())
    python: str | None = None


def options_of(given: Mapping[str, Any]) -> SlurmOptions:
    """Check the settings of SlurmLauncher, by their names.

    Raises:
        ConfigError: a setting is not legal.
    """
    for name in ("nodes", "ntasks_per_node", "cpus_per_task"):
        _check_count(name, given[name])
    seconds = _seconds(given["time"])
    warning = _check_signal(given["signal"])
    if seconds is not None and seconds <= warning:
        raise ConfigError(
            f"launcher.time is {show(given['time'])}, and launcher.signal, {given['signal']}, asks"
            f" for a checkpoint {warning} s before the time limit: nothing would be trained. Give"
            " more time, or a later signal: launcher.signal=USR1@30"
        )
    if given["array"] is not None:
        raise ConfigError(f"launcher.array is {show(given['array'])}; {_OWN['array']}.")
    tasks = given["ntasks_per_node"] or _gpus(given["gpus_per_node"]) or 1
    plain = {
        name: value
        for name in _DIRECTIVES
        if (value := {**given, "ntasks_per_node": tasks}[name]) is not None
    }
    directives = [
        _directive(name, value)
        for name, value in {**plain, **_extra(given["extra"], given)}.items()
    ]
    lines = {name: given[name] or () for name in ("setup", "srun_args")}
    for name, values in lines.items():
        if isinstance(values, str) or not all(isinstance(value, str) for value in values):
            raise ConfigError(
                f"launcher.{name} is {show(given[name])}; it must be a list of texts, as ['module"
                " load cuda']."
            )
    own = {name: given[name] for name in ("nodes", "signal", "requeue", "cpus_per_task", "python")}
    return SlurmOptions(
        directives,
        tasks=tasks,
        setup=tuple(lines["setup"]),
        srun_args=tuple(lines["srun_args"]),
        **own,
    )


_DIRECTIVES = (
    *(
        "nodes",
        "ntasks_per_node",
        "gpus_per_node",
        "cpus_per_task",
        "mem",
        "time",
        "partition",
        "account",
        "qos",
    ),
    *("constraint", "nodelist", "exclude", "mail_type", "mail_user", "signal"),
)


def _check_count(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(
            f"launcher.{name} is {show(value)}; it must be a whole number, 1 or more."
        )


def _seconds(time: Any) -> int | None:
    """Return a time limit in seconds, None for none."""
    if time is None or str(time).upper() in ("UNLIMITED", "INFINITE"):
        return None
    if not isinstance(time, str):
        raise ConfigError(
            f"launcher.time is {show(time)}, a number, which YAML also makes of 4:00:00. Write it"
            f" as Slurm's text, in quotes: {_TIME_FORMS}."
        )
    match = _TIMES.fullmatch(time)
    if match is None:
        raise ConfigError(
            f"launcher.time is {show(time)}; it must be a time as Slurm takes it: {_TIME_FORMS}."
        )
    numbers = [int(number) for number in match["numbers"].split(":")]
    if match["days"] is not None:  # from hours on
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return ((int(match["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 1:  # minutes
        return numbers[0] * 60
    *hours_of, minutes, seconds = numbers
    return (sum(hours_of) * 60 + minutes) * 60 + seconds


def _check_signal(text: Any) -> int:
    """Check launcher.signal; return its seconds before the time limit."""
    name, _, seconds = str(text).partition("@")
    if (
        name not in SIGNALS
        or not re.fullmatch("[0-9]{1,5}", seconds)
        or not 1 <= int(seconds) <= 65535
    ):
        raise ConfigError(
            f"launcher.signal is {show(text)}; it must be {' or '.join(SIGNALS)}, and how many"
            " seconds before the time limit, 1 to 65535, as USR1@60. All ranks receive it, save a"
            " checkpoint, and end."
        )
    return int(seconds)


def _gpus(value: Any) -> int | None:
    """Return the number of GPUs of Slurm's "8" or "a100:8"."""
    if value is None:
        return None
    count = str(value).rpartition(":")[2]
    if isinstance(value, bool) or not count.isdecimal() or int(count) < 1:
        raise ConfigError(
            f"launcher.gpus_per_node is {show(value)}; it must be a number, 1 or more, or a type"
            " and one: a100:8."
        )
    return int(count)


def _extra(extra: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check launcher.extra; return it by the settings' spelling."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise ConfigError(
            f"launcher.extra is {show(extra)}; it must be a mapping of sbatch's options, as"
            " {licenses: matlab}."
        )
    spelt = {name.strip("-").replace("-", "_"): value for name, value in extra.items()}
    for name in spelt:
        if name in _OWN:
            raise ConfigError(
                f"launcher.extra has '{name}', which launcher=slurm sets: {_OWN[name]}. Leave it"
                " out."
            )
        if name in given or name == "no_requeue":
            own = name.removeprefix("no_")
            raise ConfigError(
                f"launcher.extra has '{name}', which is a setting of its own: launcher.{own}=..."
            )
        if not re.fullmatch("[a-z][a-z0-9_]*", name):
            raise ConfigError(
                f"launcher.extra has '{name}', which is no option of sbatch; write it as gres or"
                " cpu_freq."
            )
    return {
        name: value for name, value in spelt.items() if value is not None and value is not False
    }


def _directive(name: str, value: Any) -> str:
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return option
    if not isinstance(value, (str, int, float)) or not str(value).isprintable() or not str(value):
        raise ConfigError(
            f"launcher.{name} is {show(value)}; it must be a number or a text on one line."
        )
    return f"{option}={shlex.quote(str(value))}"
