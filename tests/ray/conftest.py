"""One Ray cluster for all tests of this folder:
raylets on this machine, in a folder of its own, ended by their process ids.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forks import server
from tests.helpers.launching import BIN, command
from trainkit.extensions.ray.connection import take_access

__all__ = ["command"]
ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'trainkit[ray]'")
cluster_utils = pytest.importorskip("ray.cluster_utils")

ROOT = Path(__file__).parents[2]
# A raylet starts its workers by this file, so that the ranks below them are forks.
_WORKER = Path(__file__).with_name("worker.py")
NODE = {"num_cpus": 2, "object_store_memory": 150 * 2**20, "worker_path": str(_WORKER)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray leaves files and sockets to the garbage collector,
    whose warnings are errors elsewhere.
    """
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.parallel)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A ray.cluster_utils.Cluster of two nodes with 2 CPUs each; RAY_ADDRESS names it. Tests may
    add nodes of their own.

    It asks for a token, as each cluster of `ray.init()` does, and those of `ray start` on a machine
    that has one.
    """
    # short: sockets' paths have at most 107 characters
    folder = tempfile.mkdtemp(prefix="rt", dir="/tmp")
    before = dict(os.environ)
    os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    take_access({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
    # the raylets' processes have them
    os.environ |= {"PYTHONPATH": str(ROOT), "PATH": f"{BIN}:{os.environ['PATH']}"}
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    # read by the head: a job gets so long to write its checkpoint
    os.environ["RAY_JOB_STOP_WAIT_TIME_S"] = "30"
    server()  # the environment names it from here on, to the workers too
    made = cluster_utils.Cluster(
        initialize_head=True,
        head_node_args=NODE
        | {
            "include_dashboard": True,
            "dashboard_port": _free_port(),
            "dashboard_agent_listen_port": 0,
        },
    )
    try:
        made.add_node(**NODE)
        made.wait_for_nodes()
        os.environ["RAY_ADDRESS"] = made.address
        yield made
    finally:
        ray.shutdown()
        made.shutdown()  # kills the processes that it started, by their ids
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)
