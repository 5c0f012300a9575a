"""Bytes on the wire and time of a step, by the link between two hosts, the compression and the
accumulation.

    python -m benchmarks.communication [--short] [--json FILE]

Two ranks, each in a network namespace that acts as its host, with a link of a set and checked rate
and delay between them (links.py). 2.0 million parameters in 32 tensors, so small that a step waits
for the link. On each link one pair of ranks runs Horovod's contenders in turn, another
torch.distributed's (a Horovod that is up sends a little all the time):

    hand-written        hvd.DistributedOptimizer or DistributedDataParallel at their defaults, a DataLoader, SGD
    trainkit            the same at trainkit's defaults, with each compression, and with four microbatches a step

Step time: the median of rank 0's steps of all rounds but a first, without the first three of each;
the wire's time is what the link's rate alone makes of the bytes of one direction. Bytes: what the
device of rank 0's host sent and received in those steps; by arithmetic a ring of two ranks sends
and receives all gradients once each. "Of hand-written": the time of a sample to that of the same
framework's hand-written loop.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Cell, Findings, Table, main
from benchmarks.links import DEVICE, ROOT, Link, unavailable
from trainkit.extensions.programs.commands import ended_by_signals

BATCH, WIDTH, LAYERS = 8, 352, 16
LINKS = [(None, 0), (1000, 0), (1000, 1), (1000, 10), (100, 0), (100, 10)]


@dataclass(frozen=True)
class Setting:
    """How gradients are summed.

    Attributes:
        framework: "horovod" or "ddp".
        by_hand: whether trainkit has no part in it.
        compression: engine.compression.
        accumulate: microbatches of a rank in a step.
    """

    framework: str
    by_hand: bool = False
    compression: str = "none"
    accumulate: int = 1

    def __str__(self) -> str:
        if self.by_hand:
            return {"horovod": "hand-written Horovod", "ddp": "hand-written DDP"}[self.framework]
        extra = [self.compression] * (self.compression != "none") + [
            f"{self.accumulate} microbatches"
        ] * (self.accumulate > 1)
        return ", ".join(["trainkit", self.framework, *extra])

    @property
    def bytes_by_arithmetic(self) -> int:
        """The bytes that a rank sends and receives in a step."""
        return 2 * LAYERS * (WIDTH * WIDTH + WIDTH) * (4 if self.compression == "none" else 2)

    @property
    def samples(self) -> int:
        """Samples of a step on both ranks."""
        return 2 * BATCH * self.accumulate


def settings_of(framework: str, short: bool) -> list[Setting]:
    """Return the contenders, the hand-written one first."""
    if short:
        return [Setting(framework, by_hand=True), Setting(framework, compression="fp16")]
    compressions = ("none", "fp16") if framework == "horovod" else ("none", "fp16", "bf16")
    ours = [
        Setting(framework, False, compression, accumulate)
        for accumulate in (1, 4)
        for compression in compressions
    ]
    return [Setting(framework, by_hand=True), *ours]


def environment(framework: str, rank: int, link: Link, secret: str) -> dict[str, str]:
    """Return the variables that horovodrun or torchrun would set
    for a rank that is alone on its host.
    """
    if framework == "ddp":
        where = {
            "MASTER_ADDR": link.address(0),
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": DEVICE,
        }
        where["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns that these hosts have no names
        assignment = {
            "RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "TORCHELASTIC_RUN_ID": "links",
        }
        return {name: str(value) for name, value in (where | assignment).items()}
    assignment = {
        "RANK": rank,
        "SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_SIZE": 1,
        "CROSS_RANK": rank,
        "CROSS_SIZE": 2,
    }
    how = {
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_IFACE": DEVICE,
        "GLOO_RENDEZVOUS_ADDR": link.address(0),
    }
    own = {"HOSTNAME": f"host{rank}", "RENDEZVOUS_SECRET": secret, "RENDEZVOUS_SCOPE": "links."}
    return {f"HOROVOD_{name}": str(value) for name, value in (assignment | how | own).items()}


def run_ranks(framework: str, link: Link, short: bool) -> dict[str, Any]:
    """Start both ranks and return rank 0's results."""
    secret = secrets.token_hex(32)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        ranks: list[subprocess.Popen[bytes]] = []
        for rank in (0, 1):
            command = [*link.inside(rank), sys.executable, "-m", "benchmarks.linked_rank"]
            command += [framework, str(rank), folder, link.address(0), str(int(short))]
            env = os.environ | environment(framework, rank, link, secret)
            ranks.append(started.enter_context(subprocess.Popen(command, cwd=ROOT, env=env)))
            started.callback(ranks[-1].kill)
        wait_for(ranks, 600)
        return dict(json.loads(Path(folder, "result.json").read_text()))


def wait_for(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Wait for all; raise as soon as one fails."""
    end = time.monotonic() + timeout_s
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > end or any(rank.poll() for rank in ranks):
            break
        time.sleep(0.05)
    if codes := [rank.poll() for rank in ranks if rank.poll() != 0]:
        raise RuntimeError(f"ranks ended with {codes}, or not in {timeout_s:.0f} s")


def rows_of(link: Link, short: bool) -> Iterator[list[Cell]]:
    """Measure all contenders on one link."""
    for framework in ("horovod", "ddp"):
        results = run_ranks(framework, link, short)
        base: float | None = None
        for setting in settings_of(framework, short):
            own = results[str(setting)]
            step = statistics.median(seconds for taken in own["seconds"] for seconds in taken)
            sent = statistics.median(own["bytes"])
            base = base or step / setting.samples
            wire = (
                None
                if link.rate_mbit is None
                else 8e-6 * setting.bytes_by_arithmetic / 2 / link.rate_mbit
            )
            cells = [
                1000 * step,
                None if wire is None else step / wire,
                1000 * step / setting.samples,
            ]
            yield [
                str(setting),
                *cells,
                step / setting.samples / base,
                sent / 1e6,
                sent / setting.bytes_by_arithmetic,
            ]


def measure(short: bool) -> Findings:
    """Measure on each link."""
    settings: dict[str, Cell] = {"ranks": 2, "batch_size": BATCH, "threads of a rank": 1}
    if why := unavailable():
        return Findings(missing={"all": why}, settings=settings)
    checks: list[list[Cell]] = []
    titles = [
        "link (rate, delay one way)",
        "Mbit/s set",
        "Mbit/s seen",
        "round trip set, ms",
        "round trip seen, ms",
    ]
    findings = Findings(
        [Table("Links, checked between two sockets", titles, checks)], settings=settings
    )
    columns = [
        "two ranks",
        "step, ms",
        "of the wire's time",
        "a sample, ms",
        "of hand-written",
        "MB a step",
        "of arithmetic",
    ]
    with ended_by_signals():
        for rate, delay in LINKS[:1] if short else LINKS:
            with Link(rate, delay) as link:
                round_trip, mbit = link.checked(0.2 if short else 1.0)
                checks.append([str(link), rate, mbit, 2 * delay, round_trip])
                findings.tables.append(Table(f"Link: {link}", columns, list(rows_of(link, short))))
    return findings


if __name__ == "__main__":
    main(measure)
