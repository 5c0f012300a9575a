"""A step of a Slurm job as one of its tasks sees it: the tasks that srun started are the ranks.

Slurm gives each task its numbers, and the names of the nodes; there is no server at which ranks
could meet. So that all tasks know the same address without a message, the meeting point is the
first node of the step, at a port that follows from the job's number. MASTER_ADDR and MASTER_PORT,
where they are set before srun, replace these two.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import EngineError
from trainkit.launch.slurm.nodes import expand_hosts, expand_tasks

LAUNCHER, REQUEUE = "TRAINKIT_LAUNCHER", "TRAINKIT_SLURM_REQUEUE"  # set by the batch script
# Below the ports that Linux gives to outgoing connections, and above most services.
_FIRST_PORT = 20000
_PORTS = 10000


@dataclass(frozen=True)
class SlurmStep:
    """The step of this task.

    Attributes:
        rank, world_size, local_rank: this task among all, their number, and this task among those
            of its node.
        node: number of this task's node, from 0, in the order of `hosts`.
        hosts: names of the nodes, as Slurm calls them.
        tasks: number of tasks of each node.
        address, port: where rank 0 listens for the other ranks.
    """

    rank: int
    world_size: int
    local_rank: int
    node: int
    hosts: tuple[str, ...]
    tasks: tuple[int, ...]
    address: str
    port: int

    @property
    def local_size(self) -> int:
        """The number of tasks of this node."""
        return self.tasks[self.node]

    def torch_variables(self) -> dict[str, str]:
        """Return the variables that torch.distributed reads, with the check of `check_port`."""
        self.check_port()
        return {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
        }

    def check_port(self) -> None:
        """On rank 0, check that the port is free.

        Raises:
            EngineError: another process listens there.
        """
        if self.rank:
            return
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", self.port))
            except OSError as error:
                raise EngineError(
                    f"Port {self.port} of {self.hosts[0]}, at which the ranks of this Slurm job"
                    f" meet, cannot be used: {error.strerror}. Choose another one before srun:"
                    " export MASTER_PORT=29512"
                ) from None


def this_step(environ: Mapping[str, str] = os.environ) -> SlurmStep:
    """Read the step of this task, which srun started, from Slurm's variables.

    Raises:
        EngineError: a variable is missing or not as Slurm writes it, or the first node's name
            cannot be resolved.
    """
    try:
        rank, size = int(environ["SLURM_PROCID"]), int(environ["SLURM_STEP_NUM_TASKS"])
        local_rank, node = int(environ["SLURM_LOCALID"]), int(environ["SLURM_NODEID"])
        hosts = expand_hosts(environ["SLURM_STEP_NODELIST"])
        tasks = expand_tasks(environ["SLURM_STEP_TASKS_PER_NODE"])
        job, step = int(environ["SLURM_JOB_ID"]), environ.get("SLURM_STEP_ID", "0")
        port = environ.get("MASTER_PORT") or str(_FIRST_PORT + (7 * job + int(step)) % _PORTS)
        if sum(tasks) != size or len(hosts) != len(tasks) or not 0 <= node < len(hosts):
            raise ValueError(
                f"{size} tasks, {environ['SLURM_STEP_TASKS_PER_NODE']} on"
                f" {environ['SLURM_STEP_NODELIST']}"
            )
        place = (rank, size, local_rank, node, tuple(hosts), tuple(tasks))
        address = environ.get("MASTER_ADDR") or address_of(hosts[0])
        return SlurmStep(*place, address=address, port=int(port))
    except (KeyError, ValueError) as error:
        raise EngineError(
            "srun started this process, but its variables do not describe the other ranks"
            f" ({error!r}). Start trainkit with srun itself, and pass Slurm's environment on"
            " unchanged: srun --ntasks=2 python -m trainkit fit ..."
        ) from None


@functools.cache
def address_of(node: str) -> str:
    """Return a name or an address by which the tasks reach a node: its name, or what Slurm's
    configuration has for it.

    Raises:
        EngineError: the name cannot be resolved, and Slurm's configuration cannot be read or has no
            other.
    """
    try:
        socket.getaddrinfo(node, None)
    except OSError as error:
        known = re.search(r"\bNodeAddr=(\S+)", _described(node))
        if known is not None and known[1] != node:
            return known[1]
        raise EngineError(
            f"Node {node} is this Slurm job's first, where its ranks meet, but its name cannot be"
            f" resolved here ({error}), and `scontrol show node {node}` gives no other. Set its"
            " address before srun: export MASTER_ADDR=..."
        ) from None
    return node


def _described(node: str) -> str:
    if (scontrol := shutil.which("scontrol")) is None:  # in a container
        return ""
    done = subprocess.run(
        [scontrol, "show", "node", node], capture_output=True, text=True, check=False, timeout=60
    )
    return done.stdout


def start_of_job(environ: Mapping[str, str] = os.environ) -> tuple[str | None, int]:
    """Return the number of this process's Slurm job, and how often it was queued again."""
    count = environ.get("SLURM_RESTART_COUNT", "")
    return environ.get("SLURM_JOB_ID"), int(count) if count.isdecimal() else 0


def hold_signals() -> None:
    """Let signals wait until the run can save, if a batch script of launcher=slurm started this
    process.

    A rank imports for seconds, and a signal ends a process that has no handler for it yet: without
    a checkpoint, and the script would not requeue the job. `Signals` (engine/signals.py) receives
    them once it handles them.
    """
    if REQUEUE in os.environ:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGTERM))


def note_requeue(code: int, is_main: bool, environ: Mapping[str, str] = os.environ) -> int:
    """Let the batch script requeue the job after a signal ended this rank with a checkpoint; return
    the rank's exit code.

    The script learns it by a file, and each rank ends with 0: by its exit code the first rank to
    end would have srun kill the others (--kill-on-bad-exit), and their code would be the job's. A
    rank that no script started keeps its code.
    """
    if (path := environ.get(REQUEUE)) is None:
        return code
    if is_main:
        Path(path).touch()
    return 0
