"""Ranks that only meet: each forms a group of Gloo by the store of an elastic job's driver, and sums a
number. All are forks of one process, which has torch; a part of benchmarks/driver.py.

    python -m benchmarks.meeting RANKS

Prints {"seconds", "cpu_s", "megabytes"}: from the moment at which all ranks are there until the last one
has its sum, the driver's CPU time, and what it sent of the ranks' addresses.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trainkit.extensions.elastic.client import Membership
from trainkit.extensions.elastic.rendezvous import Server
from trainkit.extensions.elastic.signing import new_secret
from trainkit.extensions.elastic.store import DriverStore

_FORK_S = 0.1  # a rank's fork takes less


def meet(ranks: int) -> dict[str, float]:
    """Let ranks meet; return the figures.

    Raises:
        RuntimeError: a rank did not.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    secret = new_secret()
    told, tells = os.pipe()
    asked, asks = os.pipe()
    _fork(lambda: _serve(secret, tells, asked))
    port = int(os.read(told, 100))
    gc.freeze()
    begins = time.time() + _FORK_S * ranks
    results, ends = os.pipe()
    held, releases = os.pipe()

    def take_part(rank: int) -> None:
        try:
            seconds = _seconds_of(rank, ranks, (port, secret), begins)
        except BaseException:
            os.write(ends, b"nan\n")
            raise
        os.write(ends, f"{seconds}\n".encode())
        os.read(held, 1)  # the end of a rank would end the sums of others

    for rank in range(ranks):
        _fork(partial(take_part, rank))
    lines = b""
    while lines.count(b"\n") < ranks:
        lines += os.read(results, 65536)
    os.write(releases, bytes(ranks))
    os.write(asks, b"end")
    driver = json.loads(os.read(told, 1000))
    for _ in range(ranks + 1):
        os.wait()
    seconds = [float(line) for line in lines.split()]
    if failed := sum(map(math.isnan, seconds)):
        raise RuntimeError(f"{failed} of {ranks} ranks did not meet.")
    return {"seconds": max(seconds), **driver}


def _fork(work: Callable[[], None]) -> None:
    if os.fork() == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        os._exit(0)


def _serve(secret: str, tells: int, asked: int) -> None:
    """Be the driver's server until a byte comes; then write what it used."""
    server = Server("127.0.0.1", secret, lambda request: None, lambda request: None)
    answer, sent = server.torch_store.answer, [0]

    def counted(request: Any) -> dict[str, Any]:
        answered = answer(request)
        value = answered.get("value")
        sent[0] += sum(map(len, value)) if isinstance(value, list) else 0
        return answered

    server.torch_store.answer = counted  # type: ignore[method-assign]
    os.write(tells, str(server.port).encode())
    before = time.process_time()
    os.read(asked, 100)
    used = {"cpu_s": time.process_time() - before, "megabytes": sent[0] / 1e6}
    os.write(tells, json.dumps(used).encode())


def _seconds_of(rank: int, ranks: int, driver: tuple[int, str], begins: float) -> float:
    """Meet the others; return the seconds that it took, nan if the sum is wrong."""
    port, secret = driver
    membership = Membership(f"host/{rank}#1", ("127.0.0.1", port), secret)
    membership.generation = 1
    time.sleep(max(0.0, begins - time.time()))
    group = dist.ProcessGroupGloo(DriverStore(membership), rank, ranks, timedelta(seconds=300))
    number = torch.tensor([float(rank)])
    group.allreduce([number]).wait()
    return time.time() - begins if float(number) == ranks * (ranks - 1) / 2 else math.nan


if __name__ == "__main__":
    print(json.dumps(meet(int(sys.argv[1]))))
