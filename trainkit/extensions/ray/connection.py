"""The connection of this process to a Ray cluster;
Ray is imported only here, and by what uses it.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from trainkit.console import is_without_colors
from trainkit.errors import ConfigError, EngineError

_NO_CLUSTER = (
    "RAY_ADDRESS is '{}', and no Ray cluster answers there ({}). Give the address of a running"
    " cluster's head (host:6379), or unset RAY_ADDRESS to start a cluster on this machine."
)
_NOT_REACHED = (
    "rank 0's Ray cluster, which it started or joined, is at '{}', and this rank cannot join it"
    " ({}). Start all ranks where they reach that address, or set RAY_ADDRESS to a cluster that all"
    " of them reach."
)
_NOT_STARTED = (
    "Ray did not start on this host ({}). Try again when the host is less busy, or start a cluster"
    " once with `ray start --head`, and set RAY_ADDRESS to its address."
)
_MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_SUBMIT = "ray job submit --working-dir . -- python -m trainkit fit ... launcher=ray"
_HEAD_S = 1.0  # time for the head to accept a connection


def head_answers(address: str) -> bool:
    """Return whether the cluster's head at "host:port" accepts a connection."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _HEAD_S).close()
    except (OSError, ValueError):  # ValueError: no port
        return False
    return True


def fault_of_address(address: str) -> str:
    """Return why no process of this host can join a cluster by this RAY_ADDRESS, or "";
    may wait for a second.
    """
    if address.startswith("ray://"):
        return (
            f"RAY_ADDRESS is '{address}', an address of Ray Client: the driver would be outside of"
            f" the cluster, where ranks cannot reach it. Submit the command as a job: {_SUBMIT}"
        )
    if "://" in address:
        return (
            f"RAY_ADDRESS is '{address}', the address of the dashboard, to which jobs are"
            f" submitted: {_SUBMIT}. To attach from a node of the cluster use RAY_ADDRESS=auto."
        )
    # Ray itself would try for minutes
    if address not in ("", "auto", "local") and not head_answers(address):
        return _NO_CLUSTER.format(address, "the connection is refused")
    return ""


def load_ray(module: str, what: str) -> Any:
    """Import ray or a part of it; `what` needs it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs Ray ({error}). Install: pip install 'trainkit[ray]'"
        ) from error


def folder_of(checkpoint: Any, place: Path | None = None) -> str:
    """Return the folder of a ray.train.Checkpoint; one of a store, as storage_path=s3://... makes
    it, is downloaded.

    Args:
        checkpoint: its path is one of its own file system.
        place: where to; what was there is deleted. By default a folder of Ray's on this node.
    """
    if type(checkpoint.filesystem).__name__ == "LocalFileSystem":
        return str(checkpoint.path)
    if place is None:
        return str(checkpoint.to_directory())
    shutil.rmtree(place, ignore_errors=True)
    return str(checkpoint.to_directory(str(place)))


def connect_ray(
    what: str, address: str | None = None, runtime_env: Mapping[str, Any] | None = None
) -> Any:
    """Connect this process to a cluster, unless it is connected; return the module ray.

    Args:
        what: needs Ray, for errors.
        address: of the cluster. Default: RAY_ADDRESS, or else a new cluster on this host that ends
            with the process.
        runtime_env: Ray's environment of this process's workers.

    Raises:
        ConfigError: Ray is not installed, the cluster cannot be reached, or the environment cannot
            be made.
        EngineError: a cluster on this host did not start in time.
    """
    ray = load_ray("ray", what)
    if ray.is_initialized():  # a Tune trial, or a script with its own ray.init
        return ray
    unreached = _NO_CLUSTER if address is None else _NOT_REACHED
    # without an address Ray joins what last ran on this host
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if fault := fault_of_address(address):
        raise ConfigError(f"{what}: {fault}")
    given: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    given |= {"include_dashboard": False} if address == "local" else {}
    if is_without_colors() or not sys.stderr.isatty():
        # else its warnings have colours in files, too
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    at_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, runtime_env=dict(runtime_env) if runtime_env else None, **given)
    except (ConnectionError, TimeoutError, ray.exceptions.RayError) as error:
        raise ConfigError(f"{what}: {unreached.format(address, _first_line(error))}") from None
    except (ValueError, TypeError, RuntimeError) as error:
        cause = (
            f" launcher.runtime_env is {dict(runtime_env)}; it must be as Ray takes it, and not"
            " repeat what `ray job submit` has set."
            if runtime_env
            else ""
        )
        raise ConfigError(f"{what}: Ray cannot start: {_first_line(error)}{cause}") from None
    except Exception as error:
        if type(error) is not Exception:
            raise
        # Ray's for a cluster on this host whose processes came too late
        raise EngineError(f"{what}: {_NOT_STARTED.format(_first_line(error))}") from None
    # Ray's own handler would print addresses of its C++ code
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end if at_sigterm is signal.SIG_DFL else at_sigterm)
    return ray


def _end(number: int, frame: FrameType | None) -> None:
    print(
        "SIGTERM received: this process ends, and with it what it has on the Ray cluster",
        file=sys.stderr,
        flush=True,
    )
    raise SystemExit(128 + number)


def access() -> dict[str, str]:
    """Return the variables by which another process joins this one's cluster, which may ask for a
    token.

    Ray turns tokens on for a cluster that `ray.init()` starts, in that process alone.
    """
    if os.environ.get(_MODE, "").lower() != "token":
        return {}
    own = os.environ.get(_TOKEN_PATH)
    file = Path(own) if own else Path.home() / ".ray" / "auth_token"
    token = os.environ.get(_TOKEN) or file.read_text().strip()
    return {_MODE: "token", _TOKEN: token}


def take_access(variables: Mapping[str, str]) -> None:
    """Take what `access` returned on another rank, for this process's first connection;
    the user's own settings hold.
    """
    if variables and _MODE not in os.environ:
        os.environ |= variables
        if "ray" in sys.modules:  # it has read the mode already
            load_ray("ray._raylet", "A cluster's token").Config.initialize("")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
