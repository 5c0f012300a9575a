"""Connects to a Ray cluster: the one that RAY_ADDRESS names, as inside `ray job submit`,
or one that is started here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import ray
from ray._private.state import available_resources_per_node

from trainkit.errors import ConfigError
from trainkit.extensions.ray.connection import connect_ray
from trainkit.extensions.ray.free import Node, free_on, plain
from trainkit.extensions.ray.options import RayOptions, shown


@contextlib.contextmanager
def connected(options: RayOptions) -> Iterator[None]:
    """Connect to the cluster, unless this process is connected already, and disconnect at the end.

    Raises:
        ConfigError: the address is of another kind, no cluster answers, or a cluster started here
            is too small.
    """
    # a Tune trial, or a script with its own ray.init: they disconnect themselves
    if ray.is_initialized():
        yield
        return
    connect_ray("launcher=ray", runtime_env=options.runtime_env)
    try:
        if not os.environ.get("RAY_ADDRESS"):
            _refuse_too_small(options)
        yield
    finally:
        ray.shutdown()


def free_and_total(options: RayOptions) -> str:
    """Return what is free in the cluster, and what it has,
    on all nodes and on the largest, in words.
    """
    free = available_resources_per_node()
    return free_on(
        [
            Node(node["Resources"], free.get(node["NodeID"], {}))
            for node in ray.nodes()
            if node["Alive"]
        ],
        options,
    )


def _refuse_too_small(options: RayOptions) -> None:
    total = ray.cluster_resources()
    for name, amount in options.resources.items():
        if amount * options.least > total.get(name, 0):
            raise ConfigError(
                f"launcher.num_workers and launcher.resources_per_worker ask for {options.asked},"
                " and this machine, on which Ray was started for the job, has"
                f" {shown(plain(total))}. Ask for less (with launcher.resources_per_worker={{CPU:"
                " 0.5} two ranks share a core), or set RAY_ADDRESS to a cluster's."
            )
