"""The errors that a user can meet, and their exit codes.

    TrainkitError            exit code 1: the run could not continue
        ConfigError          exit code 2: a setting is not legal; found before anything was written
        DataError            a data set or a sample is not usable
        TaskError            the user's Task does not meet the loop's requirements
            SyncError        a step read a value off the device, which assert_no_sync forbids
        DivergenceError      a loss is not finite, or ranks no longer have the same weights
        EngineError          launcher, Horovod, torch.distributed or device do not suit the run
            JobEnded         this worker's elastic job is over
        CheckpointError      a checkpoint is missing, damaged or does not fit

    Preempted                exit code 75: a signal ended the run, and a checkpoint was written to resume from
    Dismissed                exit code 0: an elastic job continues without this worker

Every message names the key, the value given, the legal values, and the next step.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class TrainkitError(Exception):
    """Base of all errors that trainkit raises on purpose.

    A command ends with `exit_code` and prints only the message, without a traceback.
    """

    exit_code = 1


class ConfigError(TrainkitError):
    """A setting is unknown, of the wrong type, out of range, or without effect."""

    exit_code = 2


class DataError(TrainkitError):
    """A data set, a folder of data or one sample cannot be used."""


class TaskError(TrainkitError):
    """A Task lacks a method, or a method returned something that cannot be trained on."""


class SyncError(TaskError):
    """A step waited for the device."""


class DivergenceError(TrainkitError):
    """A loss is not finite, or ranks differ in values that must be equal."""


class EngineError(TrainkitError):
    """The launcher, Horovod, torch.distributed or the device does not suit the run."""


class JobEnded(EngineError):  # noqa: N818 - an event
    """This worker's elastic job is over, or its driver can no longer be reached.

    Attributes:
        is_reported: whether the driver itself reports it to the user.
    """

    def __init__(self, text: str, is_reported: bool = False) -> None:
        super().__init__(text)
        self.is_reported = is_reported


class CheckpointError(TrainkitError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class NoCheckpointError(CheckpointError, ConfigError):
    """A request names a checkpoint that is not there."""

    exit_code = 2


class _Ended(SystemExit):
    exit_code: int

    def __init__(self, text: str) -> None:
        super().__init__(self.exit_code)
        self.text = text


class Preempted(_Ended):
    """A signal ended `fit` at a step's end;
    uncaught, it ends the process with 75 (sysexits' EX_TEMPFAIL: try again).
    """

    exit_code = 75


class Dismissed(_Ended):
    """An elastic job no longer needs this worker, as its host was removed;
    uncaught, it ends the process with 0.
    """

    exit_code = 0


# What torch raises for an error of a DataLoader's worker: the worker, and the lines of its traceback.
WORKERS_ERROR = re.compile(r"Caught \w+ in (.+)\.\nOriginal (Traceback .*)", re.DOTALL)


def summary(error: BaseException | None) -> str:
    """Return an error's message; of one that trainkit does not raise on purpose, its type too."""
    if match := WORKERS_ERROR.match(str(error)):
        last = match[2].rpartition("Traceback (")[2].splitlines()[1:]
        first_line = next((line for line in last if line[:1] != " "), "")  # frames are indented
        return f"{first_line} (in {match[1]})"
    return str(error) if isinstance(error, TrainkitError) else f"{type(error).__name__}: {error}"


WEIGHTS_ALONE = (
    "Resume with the one that wrote it, or begin a new run from the weights alone:"
    " init_weights=CHECKPOINT."
)


def clause(reason: object) -> str:
    """Return an error's message, or a user's reason, for the middle of a sentence:
    without a full stop at its end.
    """
    return str(reason).rstrip().removesuffix(".")


# What users type -> the usual name, where another one is nearer by its letters, or none is.
_USUAL = {"epochs": "max_epochs", "steps": "max_steps", "learning_rate": "lr"}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest known name, or "" if none is near."""
    names = list(known)
    usual = _USUAL.get(name)
    near = [usual] if usual in names else difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""
