"""One Ray cluster for all tests of this folder: two nodes of two CPUs on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.launching import BIN, command

__all__ = ["command"]
ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray leaves sockets and files to the garbage collector, whose warnings are errors elsewhere."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a cluster with two nodes of two CPUs; it ends with the tests."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    folder = tempfile.mkdtemp(prefix="tkr", dir="/tmp")
    own = {
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "disabled",
        "RAY_TRAIN_V2_ENABLED": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    before = {name: os.environ.get(name) for name in own}
    os.environ |= own
    head = {"num_cpus": 2, "include_dashboard": True, "dashboard_port": _free_port()}
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    nodes.add_node(num_cpus=2)
    os.environ["RAY_ADDRESS"] = nodes.address
    try:
        yield nodes.address
    finally:
        cluster_utils.ray.shutdown()
        nodes.shutdown()
        os.environ.pop("RAY_ADDRESS")
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)
