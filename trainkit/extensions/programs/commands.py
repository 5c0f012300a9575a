"""Runs the commands of Horovod's build and test: to their end or ended as a group, with failures
summarised in a few lines.

cache_folder    where builds and their logs are stored
run
 |- end_group         on a time limit, Ctrl-C or any error, ends everything that was started
 `- failure            what was done, the first error lines, remedy, path of the log
     |- first_error
     `- advice
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from trainkit.errors import ConfigError, EngineError, TrainkitError

_POLL_S = 0.1
_PATIENCE_S = 5.0
_MOST_LINES = 5
_WIDEST = 200
_LAST_LINES = 12

_INSTALL = "python -m trainkit horovod install"

_ERROR = re.compile(
    r"\b(fatal )?error: |CMake Error|undefined reference|nvcc fatal|internal compiler error|virtual"
    r" memory exhausted"
    r"|Cannot allocate memory|No space left on device|command not found"
    # a rank's lines start with its number
    r"|^(\[\d+\]<std\w+>:)?\s*(ERROR: |[\w.]*(Error|Exception): )"
)
# Echoed by make between two lines of one message.
_ECHO = re.compile(
    r"^\s*(\[\s*\d+%\]|g?make(\[\d+\])?:|cd \S+ &&|\S*/(c\+\+|g\+\+|cc|gcc|cmake|nvcc) )"
)

# The first row with a matching pattern is used.
_ADVICE: tuple[tuple[str, str], ...] = (
    (
        (
            r"Killed signal|error: Killed|signal terminated program|memory exhausted|Cannot"
            r" allocate memory|bad_alloc"
        ),
        f"The compiler ran out of memory. Let one compiler run at a time: {_INSTALL} --jobs 1",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        (
            "The disk is full. Free space, or set TMPDIR (build) and TRAINKIT_CACHE (wheels) to"
            " folders on a larger one."
        ),
    ),
    (
        (
            r"No CMAKE_C(XX)?_COMPILER could|able to compile a simple|Could not find compiler"
            r" set|unable to find a build"
        ),
        (
            "There is no working C++ compiler, or no make. Install them (Debian, Ubuntu: apt-get"
            " install g++ make; Fedora: dnf install gcc-c++ make), and check the variables CC and"
            " CXX."
        ),
    ),
    (
        r"requires the language dialect|option .-std=c\+\+2|C\+\+(17|20) or later",
        (
            "The C++ compiler is too old for C++20, which torch needs. Install g++ 11 or later and"
            " set CXX to it."
        ),
    ),
    (
        r"No module named '?torch'?\b|Could NOT find Pytorch",
        "torch is missing from this environment. Install it first: pip install torch",
    ),
    (
        r"No module named '?(distutils|setuptools|packaging|wheel)\b",
        "Horovod needs it to build and to launch: pip install setuptools packaging wheel",
    ),
    (
        r"No module named '?pip'?\b",
        (
            "This environment has no pip. Install it (python -m ensurepip, or uv pip install pip)"
            " and try again."
        ),
    ),
    (
        r"Python\.h: No such file",
        "The headers of Python are missing (Debian, Ubuntu: apt-get install python3-dev).",
    ),
    (
        r"Could NOT find MPI|mpi\.h: No such file",
        f"Horovod cannot be built with the MPI that was found. Build without: {_INSTALL}",
    ),
    (
        (
            r"nvcc fatal|[Uu]nsupported (gpu|GNU)|Could NOT find (CUDAToolkit|NCCL)|nccl\.h: No"
            r" such|cuda\w*\.h: No such"
        ),
        (
            "The CUDA toolkit does not fit. Install the toolkit of torch's CUDA version, or build"
            f" without: {_INSTALL} --cpu"
        ),
    ),
    (
        r"DO NOT MATCH THE HASHES",
        (
            "The index returned another file than the release of Horovod; none of it was run. See:"
            " pip config list"
        ),
    ),
    (
        (
            r"No matching distribution|Could not find a version|[Cc]onnection|name"
            r" resolution|[Tt]imed out|SSLError"
        ),
        (
            "pip could not download from the package index. Check the network and pip's settings"
            " (pip config list). On a machine without network, download Horovod's source elsewhere"
            f" (pip download --no-deps --no-binary horovod horovod==0.28.1) and pass it: {_INSTALL}"
            " --source horovod-0.28.1.tar.gz"
        ),
    ),
    (
        r"externally-managed-environment",
        (
            "This Python belongs to the system. Create an environment first: python -m venv .venv,"
            " and install torch there."
        ),
    ),
    (
        r"Permission denied|Read-only file system",
        (
            "A folder is not writable. Use a virtual environment, and set TRAINKIT_CACHE to a"
            " folder of yours."
        ),
    ),
)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of builds and of their logs:
    $TRAINKIT_CACHE, $XDG_CACHE_HOME/trainkit or ~/.cache/trainkit.
    """
    if environ.get("TRAINKIT_CACHE"):
        return Path(environ["TRAINKIT_CACHE"]).expanduser().absolute()
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "trainkit"


def run(
    command: Sequence[str],
    *,
    what: str,
    log: Path,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    timeout_s: float | None = None,
) -> list[str]:
    """Run a command to its end and return the lines it printed.

    The output is appended to `log` instead of a pipe: a grandchild that holds a pipe open could
    block this process forever.

    Args:
        what: the command in words, as the start of a sentence: "Building Horovod".
        log: the output file; its folder is created.
        on_line: called with every line soon after it is printed.
        timeout_s: seconds after which the command and its children are ended; None for no limit.

    Raises:
        EngineError: the command failed or timed out; the message has the first error, a remedy, and
            the log's path.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with (
        log.open("ab") as out,
        log.open(encoding="utf-8", errors="replace") as back,
        started(command, out, env) as process,
    ):
        back.seek(0, os.SEEK_END)
        unfinished = ""
        while True:
            # polled before reading, so that all output before the end is read
            ended = process.poll() is not None
            *whole, unfinished = (unfinished + back.read()).split("\n")
            for line in [*whole, unfinished] if ended and unfinished else whole:
                lines.append(line)
                if on_line is not None:
                    on_line(line)
            if ended:
                break
            if deadline is not None and time.monotonic() > deadline:
                raise EngineError(
                    failure(f"{what} took more than {timeout_s:g} s and was ended", lines, log)
                )
            time.sleep(_POLL_S)
    if process.returncode != 0:
        raise EngineError(failure(f"{what} failed (exit code {process.returncode})", lines, log))
    return lines


@contextlib.contextmanager
def started(
    command: Sequence[str], out: BinaryIO, env: Mapping[str, str] | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command as a group of its own with its output in a file; the group has ended after
    the context.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group: by SIGTERM, on which a launcher ends its ranks,
    then by SIGKILL.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failure(what: str, lines: Sequence[str], log: Path) -> str:
    """Return a short message: what failed, the first error, the remedy, the path of the log."""
    shown = first_error(lines) or [line[:_WIDEST] for line in lines if line.strip()][-_MOST_LINES:]
    text = "".join(f"\n  {line}" for line in shown) or "\n  (it printed nothing)"
    return f"{what}:{text}\n{advice(shown, lines)}\nThe full log: {log}"


def first_error(lines: Sequence[str]) -> list[str]:
    """Return the first error of a build's output and the lines after it, at most five; empty if
    there is none.

    Empty lines and make's echoes are skipped: with parallel compilers they are interleaved.
    """
    start = next((i for i, line in enumerate(lines) if _ERROR.search(line)), None)
    if start is None:
        return []
    error_lines = [
        line.rstrip()
        for line in lines[start : start + 4 * _MOST_LINES]
        if line.strip() and not _ECHO.match(line)
    ]
    return [
        line[:_WIDEST] for line in textwrap.dedent("\n".join(error_lines[:_MOST_LINES])).split("\n")
    ]


def job_error(what: str, code: int, log: Path) -> ConfigError | EngineError:
    """Return the error of a job that ended with `code`: a config's own, or that of its ranks."""
    kind = ConfigError if code == ConfigError.exit_code else EngineError
    return kind(f"{what} failed (exit code {code}):{last_lines(log)}\nIts full output: {log}")


def last_lines(log: Path) -> str:
    """Return the end of a run's output, and the first error,
    which a launcher's last lines can push out of sight.
    """
    lines = log.read_text(errors="replace").splitlines()
    shown, errors = lines[-_LAST_LINES:], first_error(lines)
    if errors and errors[0] not in (line.strip() for line in shown):
        shown = [*errors, "...", *shown]
    return "".join(f"\n  {line}" for line in shown)


def advice(shown: Sequence[str], lines: Sequence[str] = ()) -> str:
    """Return the remedy for an error: by the shown lines, else by all error lines of the output."""
    for text in ("\n".join(shown), "\n".join(line for line in lines if _ERROR.search(line))):
        for pattern, remedy in _ADVICE:
            if re.search(pattern, text):
                return remedy
    return "This failure is unknown: see the log."


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so that started processes are ended with this one."""
    # only the main thread may set handlers
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ending = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in ending]
    try:
        yield
    finally:
        for number, handler in zip(ending, before, strict=True):
            signal.signal(number, handler)


def ended_cleanly(work: Callable[[], int]) -> int:
    """Run a command that starts processes, and return its exit code;
    Ctrl-C ends what it has started (130).
    """
    try:
        with ended_by_signals():
            return work()
    except TrainkitError as error:
        print(f"\n{error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nStopped; all started processes have ended.", file=sys.stderr)
        return 130
