"""Horovod's own elastic driver, for scripts with Horovod's own elastic API (`hvd.elastic.run`,
`TorchState`).

TRAINKIT_ELASTIC_DRIVER chooses the driver: trainkit or horovod. If it is not set, trainkit's driver
starts the job, and passes it on if a worker calls hvd.init() without a rank: trainkit's own workers
get a rank first, and Horovod reads it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping

from trainkit.errors import ConfigError
from trainkit.extensions.elastic.network import Network
from trainkit.launch.network import DRIVER

CHOICE = "TRAINKIT_ELASTIC_DRIVER"
HOROVOD = "horovod"
_LEGAL = {"": None, "trainkit": "trainkit", HOROVOD: HOROVOD}

WHY = (
    "the script calls hvd.init() itself, as with hvd.elastic.run: Horovod's own elastic driver"
    f" takes the job, and starts its command once more ({CHOICE}=trainkit keeps trainkit's driver)"
)
_ONE_HOST = (
    "[elastic] Horovod's own driver uses no host again on which a worker was lost, and there is one"
    " host: a lost worker ends the job. Give several (-H host1:2,host2:2), or train with trainkit's"
    " Elastic callback, whose jobs recover on one host too."
)


def chosen_driver(environ: Mapping[str, str]) -> str | None:
    """Return the driver that TRAINKIT_ELASTIC_DRIVER names, "trainkit" or "horovod"; None if it is
    not set.

    Raises:
        ConfigError: it has another value.
    """
    text = environ.get(CHOICE, "")
    if text not in _LEGAL:
        raise ConfigError(
            f"{CHOICE} is '{text}'; it must be 'trainkit', 'horovod' (for scripts with"
            " hvd.elastic.run), or not set: then trainkit's driver starts the job, and passes it"
            " on to Horovod's if the script calls hvd.init() itself."
        )
    return _LEGAL[text]


def prepare() -> None:
    """Let Horovod's rendezvous server close while a worker waits for its answer: the driver hung if
    a failed job's last worker was lost while others waited for ranks, since the server waited for
    their requests, and these for the server's end."""
    from horovod.runner.http.http_server import RendezvousHTTPServer

    RendezvousHTTPServer.block_on_close = False
    RendezvousHTTPServer.daemon_threads = True


def run_upstream(args: argparse.Namespace, network: Network) -> int:
    """Run a job under Horovod's own driver, with horovodrun's parsed arguments, and return 0.

    Args:
        args: changed where Horovod's driver refuses what trainkit's accepts: a single host.
        network: that of the job under trainkit's driver; where it is this host's, no common
            interface is searched for.

    Raises:
        RuntimeError: the job failed, by Horovod's report.
    """
    from horovod.runner import launch

    os.environ[CHOICE] = HOROVOD  # _run_elastic asks trainkit for a driver, and gets none
    if network.is_closed:
        args.nics = set(network.interfaces)
    elif args.nics:
        args.nics = {name for name in args.nics if not name.startswith(DRIVER)} or None
    hosts = args.hosts or f"localhost:{args.num_proc}"
    if not args.host_discovery_script and "," not in hosts:
        print(_ONE_HOST, file=sys.stderr, flush=True)
        args.host_discovery_script = f"echo {shlex.quote(hosts)}"
    launch._run_elastic(args)
    return 0
