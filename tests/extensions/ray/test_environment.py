"""runtime_env: each part of it reaches the ranks, or is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.extensions.ray.test_options import options
from trainkit.errors import ConfigError
from trainkit.extensions.ray.free import Node

cluster = pytest.importorskip("trainkit.extensions.ray.cluster", reason="ray is not installed")


def test_a_part_that_ray_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray leaves it out with a warning, which a driver without its log does not show; a plugin of
    the user's may know it.
    """
    text = "x.runtime_env has 'env_var', which Ray would ignore. Did you mean 'env_vars'?"
    with pytest.raises(ConfigError, match=text.replace("?", r"\?")):
        cluster.refuse_bad_environment("x.runtime_env", {"env_var": {}}, is_joined=False)
    monkeypatch.setenv("RAY_RUNTIME_ENV_PLUGINS", "[]")
    cluster.refuse_bad_environment("x.runtime_env", {"env_var": {}}, is_joined=False)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"working_dir": "."}, r"working_dir is '\.', and this process is connected to Ray alr"),
        ({"py_modules": ["s3://a.zip", "/b"]}, r"py_modules is '/b', .* Give it to ray\.init"),
        ({"env_vars": {"A": 1}}, r"is not as Ray takes it: .*env_vars"),
    ],
)
def test_a_joined_connection_takes_no_folders(environment: dict[str, Any], text: str) -> None:
    """Ray sends them with the connection, which is the script's own; an address is taken."""
    with pytest.raises(ConfigError, match=text):
        cluster.refuse_bad_environment("x.runtime_env", environment, is_joined=True)
    cluster.refuse_bad_environment("x.", {"working_dir": "s3://a.zip"}, is_joined=True)


def test_actors_have_the_environment_on_a_connection_of_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After ray.init() of the script it was without effect; on a connection of ours Ray has it."""
    given = options(runtime_env={"env_vars": {"A": "1"}})
    assert "runtime_env" not in given.actor
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster, "living_nodes", lambda: [Node({"CPU": 1}, {})])
    with cluster.connected(given) as joined:
        assert joined.actor["runtime_env"] == {"env_vars": {"A": "1"}}


@pytest.mark.parametrize("grows", [True, False])
def test_what_no_node_has_is_refused_unless_nodes_may_come(
    grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An autoscaler may bring a GPU: then the job waits, and says so."""
    nodes = [Node({"CPU": 8, "GPU": 1}, {}), Node({"CPU": 8}, {})]
    monkeypatch.setattr(cluster, "living_nodes", lambda: nodes)
    monkeypatch.setattr(cluster, "may_grow", lambda: grows)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 16, "GPU": 1})
    asked = options(resources_per_worker={"CPU": 1, "GPU": 1}, workers_per_bundle=2)
    text = (
        r"x\.resources_per_worker is \{CPU: 1, GPU: 1\}: GPU: 2 for 2 ranks of a bundle on one node,"
        r" and the node with the most has 1\. The cluster has \{CPU: 16, GPU: 1\}"
    )
    refused = contextlib.nullcontext() if grows else pytest.raises(ConfigError, match=text)
    with refused, cluster.connected(asked, "x."):
        pass
