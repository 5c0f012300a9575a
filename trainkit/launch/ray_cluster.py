"""The connection of this process to a Ray cluster; Ray is imported only here, and by what uses it."""

from __future__ import annotations

import importlib
import os
from typing import Any

from trainkit.errors import ConfigError


def load_ray(module: str, what: str) -> Any:
    """Import ray or a part of it; `what` needs it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what} needs Ray ({error}). Install: pip install 'trainkit[ray]'") from error


def connect_ray(what: str, address: str | None = None) -> Any:
    """Connect this process to a cluster, unless it is connected; return the module ray.

    Args:
        what: needs Ray, for errors.
        address: of the cluster. Default: RAY_ADDRESS, or else a new cluster on this host that ends with the process.

    Raises:
        ConfigError: Ray is not installed, or the cluster cannot be reached.
    """
    ray = load_ray("ray", what)
    address = address or os.environ.get("RAY_ADDRESS") or "local"  # without an address Ray joins what last ran on this host
    if not ray.is_initialized():
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            ray.init(address=address, include_dashboard=False if address == "local" else None, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"{what}: the Ray cluster at {address} cannot be reached from this host ({error}). With several hosts, start "
                "Ray on each (ray start) and set RAY_ADDRESS."
            ) from error
    return ray
