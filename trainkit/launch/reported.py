"""Which rank prints an error that all ranks of a host have: the first one, though they may be
seconds apart.

print_once               a command's error (cli/guard.py)
report_uncaught_once     the error that ends a script
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import TracebackType

from trainkit.console import wrapped, wrapped_for
from trainkit.errors import JobEnded, TrainkitError
from trainkit.launch.environment import Launcher, read_launcher
from trainkit.launch.terminal import columns_of_launcher
from trainkit.safety.tracebacks import FULL, is_users, text_of

_FRESH_S = 60.0
# How long another rank waits before it prints an error. If rank 0 has one too, it has mostly
# printed it by then, and the launcher ends all ranks; otherwise this rank's message is the one that
# the user needs.
_RANK_0_FIRST_S = 2.0
# Together they name a job, and its attempt.
_JOB = [
    *(
        "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        "HOROVOD_GLOO_RENDEZVOUS_PORT",
        "OMPI_MCA_orte_hnp_uri",
        "PMIX_NAMESPACE",
    ),
    *(
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
    ),
]


def is_first(text: str) -> bool:
    """Return whether no other rank of this job on this host has reported
    this text within the last minute; note it.
    """
    # torchrun's folder of this start and attempt: a port that the user chose names the next one too
    attempt = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    job = [str(attempt), *(os.environ.get(name, "") for name in _JOB)]
    key = hashlib.sha256("\0".join([*job, text]).encode(errors="replace")).hexdigest()
    path = Path(tempfile.gettempdir(), f"trainkit-{os.getuid()}-reported")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return True
    with os.fdopen(file, "r+") as notes:
        fcntl.flock(notes, fcntl.LOCK_EX)
        now = time.time()
        reports = re.findall(r"^(\d{1,12}) (\w{64})$", notes.read(), re.MULTILINE)
        fresh = [(at, other) for at, other in reports if abs(now - int(at)) < _FRESH_S]
        if any(key in report for report in fresh):
            return False
        notes.seek(0)
        notes.truncate()
        notes.writelines(f"{at} {other}\n" for at, other in [*fresh, (int(now), key)])
    return True


def print_once(text: str, launcher: Launcher, is_prose: bool = False) -> None:
    """Print an error, unless it is empty or another rank of this host has printed it; prose breaks
    between words on a terminal, this rank's or its launcher's.
    """
    if not launcher.is_main:
        time.sleep(_RANK_0_FIRST_S)
    if text and is_first(text):
        host = os.environ.get("HOROVOD_HOSTNAME", "")
        where = f"rank {launcher.rank}{f' on {host}' * bool(host)}"
        text = f"Error on {where}: {text}"
        if is_prose:
            columns = columns_of_launcher()
            text = wrapped(text, columns) if columns else wrapped_for(sys.stderr, text)
        print(text, file=sys.stderr, flush=True)


def report_uncaught_once() -> None:
    """Print the error that ends a script as a command's: trainkit's own without its traceback,
    others with the user's frames; of several ranks, one does. A hook of the script's own stays.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    is_prose = isinstance(error, TrainkitError) and os.environ.get(FULL) != "full"
    text = _sentence(error, trace) if is_prose else text_of(error)
    launcher = read_launcher()
    if isinstance(error, JobEnded) and error.is_reported:
        return
    if launcher.world_size > 1:
        print_once(text, launcher)
    else:
        print(wrapped_for(sys.stderr, f"Error: {text}") if is_prose else text, file=sys.stderr)


def _sentence(error: BaseException, trace: TracebackType | None) -> str:
    """Return an error of trainkit, and the last line of the script before it."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if is_users(frame.filename)]
    return str(error) + (
        f"\n{own[-1].filename}, line {own[-1].lineno}: {own[-1].line}" if own else ""
    )
