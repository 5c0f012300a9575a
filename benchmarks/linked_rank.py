"""One rank of the benchmark of communication: its framework's contenders, in turn.
Started by communication.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed as dist
from horovod.runner.http.http_server import RendezvousServer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainkit
from benchmarks.communication import BATCH, LAYERS, WIDTH, Setting, settings_of
from benchmarks.harness import take_turns
from benchmarks.links import bytes_so_far
from trainkit.api.callback import Callback
from trainkit.engine.select import make_engine

WARM = 3  # in the first ones Horovod's cache and the coordinator's pace settle


def make_model() -> nn.Sequential:
    """Return the model, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def make_data(setting: Setting, steps: int) -> TensorDataset:
    """Return as many samples as the steps take."""
    return TensorDataset(torch.randn(setting.samples * (WARM + steps), WIDTH))


@dataclass
class Steps:
    """Records the ends of steps, and the bytes of those after the warm-up."""

    ends: list[float] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)

    def end(self) -> None:
        """Note one."""
        self.ends.append(time.perf_counter())
        self.counted.append(bytes_so_far())

    @property
    def seconds(self) -> list[float]:
        """Of each step after the warm-up."""
        ends = self.ends[WARM - 1 :]
        return [after - before for before, after in zip(ends, ends[1:], strict=False)]

    @property
    def bytes_a_step(self) -> float:
        """The mean after the warm-up."""
        return (self.counted[-1] - self.counted[WARM - 1]) / (len(self.counted) - WARM)


class Task(trainkit.Task):
    """The model under trainkit."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Notes(Callback):
    """Records each step's end."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Note one."""
        self.steps.end()


def with_trainkit(setting: Setting, steps: int, folder: str) -> Steps:
    """Train with trainkit."""
    noted = Steps()
    trainer = trainkit.Trainer(
        engine=make_engine(setting.framework, compression=setting.compression),  # type: ignore[arg-type]
        accumulate_grad_batches=setting.accumulate,
        max_epochs=1,
        callbacks=[Notes(noted)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        run_dir=folder,
    )
    trainer.fit(Task(), DataLoader(make_data(setting, steps), BATCH, shuffle=True))
    return noted


def by_hand(setting: Setting, steps: int, rank: int) -> Steps:
    """Train with the loop of either framework's documentation."""
    model: nn.Module = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if setting.framework == "horovod":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    else:
        model = DistributedDataParallel(model)
    data, noted = make_data(setting, steps), Steps()
    for (inputs,) in DataLoader(data, BATCH, sampler=DistributedSampler(data, 2, rank)):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        noted.end()
    return noted


def start_horovod(rank: int, folder: Path, address: str) -> None:
    """Initialize Horovod on a rank;
    its ranks meet at a server on rank 0's host, in a thread of rank 0.
    """
    port = folder / "port"
    if rank == 0:
        server = RendezvousServer()
        number = server.start(address=address)
        server.init([])
        port.with_suffix(".new").write_text(str(number))
        port.with_suffix(".new").rename(port)
    while not port.exists():
        time.sleep(0.01)
    os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = port.read_text()
    hvd.init()


def worker(framework: str, rank: int, folder: Path, address: str, short: bool) -> None:
    """Let a framework's contenders take turns; rank 0 writes its results."""
    torch.set_num_threads(1)
    steps, rounds = (2, 1) if short else (4, 2)
    found: dict[str, list[float]] = {}

    def run(setting: Setting) -> list[float]:
        noted = (
            by_hand(setting, steps, rank)
            if setting.by_hand
            else with_trainkit(setting, steps, str(folder / "run"))
        )
        found.setdefault(str(setting), []).append(noted.bytes_a_step)
        return noted.seconds

    barrier: Callable[[], Any] = hvd.barrier if framework == "horovod" else dist.barrier
    if framework == "horovod":
        start_horovod(rank, folder, address)
    else:
        dist.init_process_group("gloo")
    contenders = {str(setting): partial(run, setting) for setting in settings_of(framework, short)}
    seconds = take_turns(contenders, rounds, between=barrier)
    if rank == 0:
        result = {name: {"seconds": seconds[name], "bytes": found[name][1:]} for name in contenders}
        (folder / "result.json").write_text(json.dumps(result))
    barrier()
    if framework == "ddp":
        dist.destroy_process_group()


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5] == "1")
