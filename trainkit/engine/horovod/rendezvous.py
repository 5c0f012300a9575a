"""Has Horovod's ranks meet under srun, which starts no server for them: rank 0 runs the one that
horovodrun would run.

Each rank writes its address there, and reads those of the others, when hvd.init() connects them;
requests are signed with the job's secret, that all tasks have in their environment.
"""

from __future__ import annotations

import os
import time

from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from trainkit.errors import EngineError
from trainkit.launch.network import SECRET, interface_to
from trainkit.launch.slurm.step import SlurmStep, address_of
from trainkit.safety.threads import printed, start_thread

_START_S = 600.0  # tasks import torch for different times: a cold file system takes minutes
_POLL_S = 0.5
_SCOPE = "trainkit"
_GO = "go"


def meet(step: SlurmStep) -> dict[str, str]:
    """Start the server on rank 0, and wait for it on the others; return the variables that
    hvd.init() reads.

    Raises:
        EngineError: the tasks have no secret in common, the port is taken, or rank 0's server
            cannot be reached.
        ConfigError: there is no route to the other nodes.
    """
    # srun --mpi=pmix with an MPI build: MPI has them meet
    if os.environ.get("HOROVOD_CONTROLLER") == "mpi":
        return {}
    if not os.environ.get(SECRET):
        raise EngineError(
            "engine=horovod under srun needs a secret that all tasks share, to sign what they send"
            f" each other. Before srun: export {SECRET}=$(openssl rand -hex 32). launcher=slurm and"
            " horovodrun set it themselves."
        )
    interface = os.environ.get("HOROVOD_GLOO_IFACE")
    if interface is None:
        others = [host for number, host in enumerate(step.hosts) if number != step.node]
        interface = interface_to(address_of(others[0])) if others else "lo"
    _wait_for_others(step, _serve(step) if step.rank == 0 else None)
    cross = [number for number, tasks in enumerate(step.tasks) if tasks > step.local_rank]
    numbers = {
        "RANK": step.rank,
        "SIZE": step.world_size,
        "LOCAL_RANK": step.local_rank,
        "LOCAL_SIZE": step.local_size,
        "CROSS_RANK": cross.index(step.node),
        "CROSS_SIZE": len(cross),
    }
    return {f"HOROVOD_{name}": str(number) for name, number in numbers.items()} | {
        "HOROVOD_HOSTNAME": step.hosts[step.node],
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": step.address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(step.port),
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def _serve(step: SlurmStep) -> RendezvousHTTPServer:
    """Serve to the end of this process: ranks may meet again in a second fit."""
    step.check_port()
    server = RendezvousHTTPServer(("", step.port), RendezvousHandler, 0)
    # The server counts the ranks of each scope, by the sizes alone.
    slots = [
        SlotInfo(
            host, 0, local, 0, step.world_size, tasks, sum(other > local for other in step.tasks)
        )
        for host, tasks in zip(step.hosts, step.tasks, strict=True)
        for local in range(tasks)
    ]
    server.init(slots)
    start_thread("rendezvous", server.serve_forever, printed("Rank 0 listens again.", retry_s=0.1))
    return server


def _wait_for_others(step: SlurmStep, server: RendezvousHTTPServer | None) -> None:
    """Return on all ranks at nearly the same time:
    hvd.init() waits for 30 s, and some may import torch for minutes.
    """
    place = (step.address, step.port, _SCOPE)
    end = time.monotonic() + _START_S
    late = "?"
    while time.monotonic() < end:
        try:
            if server is None:
                put_data_into_kvstore(*place, str(step.rank), step.rank)
                read_data_from_kvstore(*place, _GO)
                return
            came = set(server.cache.get(_SCOPE, {}))
            if len(came) == step.world_size - 1:
                put_data_into_kvstore("127.0.0.1", step.port, _SCOPE, _GO, True)
                return
            late = ", ".join(
                str(rank) for rank in range(1, step.world_size) if str(rank) not in came
            )
        except RuntimeError as error:  # rank 0 does not serve yet, or the others have not come
            late = f"0 at {step.address}:{step.port} ({error.args[-1]})"
        time.sleep(_POLL_S)
    raise EngineError(
        f"Rank {step.rank} of this Slurm job waited for {_START_S:g} s for rank {late}. Is the"
        " first node's name that of a network which all nodes share? export MASTER_ADDR=... before"
        " srun names another."
    )
