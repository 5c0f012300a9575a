"""launcher=ray on a cluster of two hosts: ranks on both, and a host that is lost."""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.hosts.conftest import Make
from tests.hosts.jobs import ROOT
from trainkit.extensions.reports.status.status import read_status

pytest.importorskip("ray", reason="ray is not installed: pip install 'trainkit[ray]'")
pytestmark = pytest.mark.parallel

PORT = 6379


def wait_for(holds: Callable[[], bool], what: str, timeout_s: float = 300) -> None:
    """Wait until something holds."""
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.2)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path, as Ray's sockets need one."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def test_a_job_spans_two_nodes_and_outlives_one(
    make_hosts: Make, tmp_path: Path, short: Path
) -> None:
    """Rank 0 is beside the driver; the other node loses power,
    and the job trains to its end with the rank that is left.
    """
    hosts, run = make_hosts(), tmp_path / "run"
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "PYTEST_"))}
    environ |= {
        "PATH": hosts.path,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_ADDRESS": f"{hosts.address(0)}:{PORT}",
        # else a head takes a token of the machine, if it has one, and other nodes do not
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }

    def start(host: int, line: str, name: str) -> subprocess.Popen[bytes]:
        with (tmp_path / name).open("wb") as output:
            return subprocess.Popen(
                [*hosts.on(host), *line.split()],
                env=environ,
                cwd=tmp_path,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def node(host: int) -> subprocess.Popen[bytes]:
        joins = (
            f"--address {hosts.address(0)}:{PORT}"
            if host
            else f"--head --port {PORT} --include-dashboard false"
        )
        size = f"--num-cpus 1 --object-store-memory {150 * 2**20} --temp-dir {short}/{host}"
        line = (
            f"ray start {joins} --node-ip-address {hosts.address(host)} {size}"
            " --disable-usage-stats --block"
        )
        return start(host, line, f"ray{host}")

    def has_started(host: int) -> bool:
        return "Ray runtime started" in (tmp_path / f"ray{host}").read_text()

    nodes = []
    for host in (0, 1):
        nodes.append(node(host))
        wait_for(partial(has_started, host), f"the start of node {host}")
    fit = (
        "python -m trainkit fit conf=mlp trainer.max_epochs=150 launcher=ray"
        " launcher.num_workers=[1,2]"
    )
    job = start(0, f"{fit} launcher.placement_strategy=SPREAD run_dir={run}", "output")
    addresses = {hosts.address(0), hosts.address(1)}

    def spans(names: set[str]) -> bool:
        progress = read_status(run).progress if run.is_dir() else None
        assert job.poll() is None, (tmp_path / "output").read_text()[-3000:]
        return progress is not None and set(progress.hosts) == names and progress.step > 20

    wait_for(lambda: spans(addresses), "ranks on both hosts")
    hosts.lose(1)
    wait_for(lambda: spans({hosts.address(0)}), "a rank that is left")
    assert job.wait(240) == 0, (tmp_path / "output").read_text()[-3000:]
    found = read_status(run)
    assert (
        found.progress is not None
        and found.state == "ended"
        and found.progress.step == found.progress.total_steps
    )
    for process in nodes:
        process.kill()
        process.wait()
