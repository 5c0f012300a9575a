"""One Slurm cluster for all tests of this folder:
munged, slurmctld and three slurmd on this machine, in their own folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers.launching import BIN, command

__all__ = ["command"]
ROOT = Path(__file__).parents[2]
NODES = ("n1", "n2", "n3")  # n3 is for the tests that take a whole node
CPUS = 4
_PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "squeue",
    "scancel",
    "sinfo",
    "scontrol",
    "sacct",
)
_STARTS = 3
# A requeued job waits until the credentials of its last start have expired: 2 minutes by default, 5
# s at least.
_CONF = """
ClusterName=trainkit
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=20
MinJobAge=86400
FirstJobId={first}
SlurmdParameters=config_overrides
PartitionName=main Nodes=ALL Default=YES MaxTime=UNLIMITED State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL MaxTime=120 State=UP PriorityTier=10 PreemptMode=OFF
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ranks leave their files to the operating system."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.parallel)


@dataclass
class Daemons:
    """The cluster's processes, that carry its configuration's path in their environment."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *words: str) -> None:
        """Start a daemon in the foreground of no terminal; its output is in the folder."""
        name = "-".join(word.strip("-") for word in words[:1] + words[-1:] if "/" not in word)
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)

    def stop(self) -> None:
        """End the daemons, newest first, and what they have started."""
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        self._kill_rest()
        for process in self.processes:
            process.wait()
        self.processes.clear()

    def _kill_rest(self) -> None:
        mark = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):  # gone by now
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        os.kill(int(entry.name), signal.SIGKILL)

    def log(self) -> str:
        """What the daemons have printed."""
        return "\n".join(
            path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("*.log"))
        )


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    """A cluster of three nodes with 4 CPUs each, all this machine;
    SLURM_CONF names it. Its folder.
    """
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        pytest.skip(
            f"not installed: {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client"
            " munge)"
        )
    if os.geteuid() != 0:
        pytest.skip("slurmd starts jobs as their users, which needs root")
    # short: sockets' paths have at most 107 characters
    folder = Path(tempfile.mkdtemp(prefix="sl", dir="/tmp"))
    before, daemons = dict(os.environ), Daemons(folder)
    os.environ |= {"SLURM_CONF": f"{folder}/slurm.conf", "OMP_NUM_THREADS": "1"}
    # the jobs have them
    os.environ |= {"PYTHONPATH": str(ROOT), "PATH": f"{BIN}:{os.environ['PATH']}"}
    try:
        if not any(_started(daemons) for _ in range(_STARTS)):
            pytest.skip(f"Slurm does not start on this machine:\n{daemons.log()}")
        yield folder
        subprocess.run(["scancel", "--user=root"], check=False)
    finally:
        daemons.stop()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


def _started(daemons: Daemons) -> bool:
    """Start all daemons at free ports;
    return whether the nodes are up, or else end all: another process may take a port.
    """
    folder, host = daemons.folder, socket.gethostname().partition(".")[0]
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(exist_ok=True, mode=0o700)
    key = folder / "munge" / "key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    ports = _free_ports(1 + len(NODES))
    lines = _CONF.format(
        host=host, folder=folder, ports=ports, first=1000 + secrets.randbelow(8000)
    ).splitlines()
    nodes = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS}"
        " RealMemory=4000"
        for node, port in zip(NODES, ports[1:], strict=True)
    ]
    (folder / "slurm.conf").write_text("\n".join([*lines[:-2], *nodes, *lines[-2:], ""]))
    options = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    daemons.start("munged", "--force", "--foreground", f"--socket={folder}/munge/socket", *options)
    daemons.start("slurmctld", "-D", "-c")
    for node in NODES:
        daemons.start("slurmd", "-D", "-N", node)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"],
            capture_output=True,
            check=False,
        )
        if done.stdout.split() == [b"idle"] * len(NODES):
            return True
        time.sleep(0.2)
    daemons.stop()
    return False


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.socket()) for _ in range(number)]
        for server in servers:
            server.bind(("", 0))
        return [int(server.getsockname()[1]) for server in servers]
