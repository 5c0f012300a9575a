"""Counts the bytes that cross the loopback device of this network in a step, under each kind of
communication.

    unshare -n sh -c 'ip link set lo up && torchrun --nproc-per-node 2 traffic.py OUT'

Only in a network of its own does the device carry nothing else. Rank 0 saves {kind: bytes a step}.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from tests.helpers.toy import quiet
from trainkit.api.callback import Callback
from trainkit.engine.select import make_engine

OUT = Path(sys.argv[1])
FIRST, LAST = 10, 50  # of the steps that are counted
KINDS = {
    "exact": "exact",
    "powersgd": trainkit.PowerSGD(rank=4, start_after_steps=0),
    "diloco": trainkit.DiLoCo(every_n_steps=10),
    "fragments": trainkit.DiLoCo(every_n_steps=10, fragments=2),
}


def bytes_so_far() -> int:
    """Return the bytes that the loopback device has received: it sends to itself."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise OSError("there is no loopback device")


class Square(trainkit.Task):
    """Two square layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Count(Callback):
    """Counts the bytes of the steps between two."""

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Wait for the other rank, so that its messages count in the same step."""
        if trainer.global_step in (FIRST, LAST):
            trainer.engine.comm.barrier()
            self.counted = bytes_so_far() - (0 if trainer.global_step == FIRST else self.counted)
            trainer.engine.comm.barrier()


if __name__ == "__main__":
    with make_engine("auto") as engine:
        found = {}
        for kind, communication in KINDS.items():
            count = Count()
            settings: dict[str, Any] = {"callbacks": [count], "max_steps": LAST, "max_epochs": 99}
            trainer = quiet(OUT.parent / kind, communication=communication, **settings)
            trainer.fit(Square(), DataLoader(TensorDataset(torch.randn(400, 256)), 4))
            found[kind] = count.counted / (LAST - FIRST)
        if engine.ranks.is_main:
            torch.save(found, OUT)
        engine.comm.barrier()
