"""Connects to a Ray cluster: the one that RAY_ADDRESS names, as inside `ray job submit`,
or one that is started here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.state import available_resources_per_node
from ray._private.worker import global_worker
from ray.runtime_env import RuntimeEnv

from trainkit.console import info
from trainkit.errors import ConfigError, did_you_mean
from trainkit.extensions.ray.connection import connect_ray
from trainkit.extensions.ray.free import Node, adds_nodes, free_on, lacked, plain
from trainkit.extensions.ray.options import RayOptions, shown

_PLUGINS = "RAY_RUNTIME_ENV_PLUGINS"
_JOINS_S = 20.0  # time for nodes that are started together to join
_STATUS_S = 10.0  # time for a cluster that has just started to report how it is scaled


@contextlib.contextmanager
def connected(options: RayOptions, key: str = "launcher.") -> Iterator[RayOptions]:
    """Connect to the cluster, unless this process is connected already, and disconnect at the end;
    yield the options for ranks on this connection.

    Args:
        options: of the ranks.
        key: begins the names of settings in messages.

    Raises:
        ConfigError: the address is of another kind, no cluster answers, the cluster can never hold
            a rank, one that is started here is too small, or the runtime_env is not one of Ray's.
    """
    is_joined = ray.is_initialized()
    refuse_bad_environment(f"{key}runtime_env", options.runtime_env or {}, is_joined=is_joined)
    options = dataclasses.replace(options, is_joined=is_joined)
    # a Tune trial, or a script with its own ray.init: they disconnect themselves
    if is_joined:
        _refuse_lacking(options, key)
        yield options
        return
    connect_ray("launcher=ray", runtime_env=options.runtime_env)
    try:
        if not os.environ.get("RAY_ADDRESS"):
            _refuse_too_small(options, key)
        _refuse_lacking(options, key)
        yield options
    finally:
        ray.shutdown()


def refuse_bad_environment(key: str, environment: Mapping[str, Any], *, is_joined: bool) -> None:
    """Refuse what Ray would leave out, with a warning of its log, or would fail on in an actor.

    Args:
        key: of the setting, for messages.
        environment: of the ranks.
        is_joined: whether it is that of actors alone.

    Raises:
        ConfigError: it has a part that Ray does not know, or a folder that only `ray.init` takes.
    """
    # plugins bring parts of their own
    known = set(RuntimeEnv.known_fields) | set(environment if os.environ.get(_PLUGINS) else ())
    for name in environment:
        if name not in known:
            public = sorted(field for field in known if not field.startswith("_"))
            raise ConfigError(
                f"{key} has '{name}', which Ray would ignore.{did_you_mean(name, public)} Ray's"
                f" parts are {', '.join(public)}."
            )
    if not is_joined:
        return
    for name in ("working_dir", "py_modules"):
        given = environment.get(name) or ()
        folders = [str(at) for at in ((given,) if isinstance(given, str) else given)]
        if local := [folder for folder in folders if "://" not in folder]:
            raise ConfigError(
                f"{key}.{name} is '{local[0]}', and this process is connected to Ray already: a"
                " folder of this machine is sent with the connection alone. Give it to ray.init("
                f"runtime_env={{'{name}': ...}}), or as an address (s3://..., https://...)."
            )
    try:
        RuntimeEnv(**environment)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key} is not as Ray takes it: {error}") from None


def living_nodes() -> list[Node]:
    """Return the cluster's nodes, with what they have and have free."""
    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [Node(node["Resources"], free.get(node["NodeID"], {})) for node in alive]


def free_and_total(options: RayOptions) -> str:
    """Return what is free in the cluster, and what it has,
    on all nodes and on the largest, in words.
    """
    return free_on(living_nodes(), options)


def may_grow() -> bool:
    """Return whether the cluster has an autoscaler, or it is unknown; may wait for some seconds."""
    worker: Any = global_worker
    end = time.monotonic() + _STATUS_S
    while time.monotonic() < end:
        status = worker.gcs_client.internal_kv_get(DEBUG_AUTOSCALING_STATUS.encode(), None)
        if status is not None and (adds := adds_nodes(status)) is not None:
            return adds
        time.sleep(0.2)
    return True


def _refuse_lacking(options: RayOptions, key: str) -> None:
    """Refuse a resource that no node has so much of, in a cluster without an autoscaler; its nodes
    may still be joining.
    """
    nodes = [node.total for node in living_nodes()]
    if lacked(nodes, options.bundle) is None or may_grow():
        return
    wait_s = min(_JOINS_S, options.start_timeout_s)
    end = time.monotonic() + wait_s
    info(f"No node has {shown(options.bundle)} yet: waiting {wait_s:g} s for those that join.")
    while (name := lacked(nodes, options.bundle)) is not None and time.monotonic() < end:
        time.sleep(0.2)
        nodes = [node.total for node in living_nodes()]
    if name is None:
        return
    has = max((node.get(name, 0) for node in nodes), default=0)
    each = f" for {options.per_bundle} ranks of a bundle" * (options.per_bundle > 1)
    leave = "leave GPU out to train on CPUs" if name == "GPU" else "ask for less"
    raise ConfigError(
        f"{key}resources_per_worker is {shown(options.resources)}: {name}: {options.bundle[name]:g}"
        f"{each} on one node, and the node with the most has {has:g}. The cluster has"
        f" {shown(plain(ray.cluster_resources()))}, and no autoscaler that adds nodes. Add a node"
        f" that has it first, set RAY_ADDRESS to another cluster's, or {leave}."
    )


def _refuse_too_small(options: RayOptions, key: str) -> None:
    total = ray.cluster_resources()
    for name, amount in options.resources.items():
        if amount * options.least > total.get(name, 0):
            raise ConfigError(
                f"{key}num_workers and {key}resources_per_worker ask for {options.asked}, and this"
                f" machine, on which Ray was started for the job, has {shown(plain(total))}. Ask"
                f" for less (with {key}resources_per_worker={{CPU: 0.5}} two ranks share a core), or"
                " set RAY_ADDRESS to a cluster's."
            )
