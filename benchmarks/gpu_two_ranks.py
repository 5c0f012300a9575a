"""Two ranks on one GPU train as one process does: each case of ddp, over gloo, since NCCL wants a GPU
for each rank. A part of gpu.py.

    torchrun --nproc-per-node 2 -m benchmarks.gpu_two_ranks cuda FOLDER

Rank 0 writes FOLDER/<number of the case>.pt, with the weights or the text of an error.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.data import QUIET
from trainkit import Task, Trainer
from trainkit.engine.ddp.engine import DDPEngine
from trainkit.engine.single import SingleEngine

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation, clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "fp16": {"precision": "16-mixed"},
    "bf16": {"precision": "bf16-mixed"},
    "sync_batchnorm": {"sync_batchnorm": True},
    "halve_batch_on_oom": {"halve_batch_on_oom": True},
    "stop_on_nonfinite": {"stop_on_nonfinite": True},
    "assert_no_sync": {"assert_no_sync": True},
}


class Pixels(Task):
    """A small model with batch norm where all ranks share it, and a norm of each sample elsewhere."""

    def __init__(self, shares_norm: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        norm = nn.BatchNorm2d(8) if shares_norm else nn.GroupNorm(2, 8)
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            norm,
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


@contextmanager
def over_gloo() -> Iterator[None]:
    """Have torch's groups sum through the host."""
    begin = dist.init_process_group

    def gloo(backend: str | None = None, **given: Any) -> None:
        given.pop("device_id", None)
        begin("gloo", **given)

    with mock.patch.object(dist, "init_process_group", gloo):
        yield


def weights_of(engine: Any, batch_size: int, device: str, case: str) -> Tensor:
    """Return all weights after three epochs of 96 images, as one vector on the host. Of one process
    batch norm is that of the batch, which two ranks share.
    """
    settings = dict(CASES[case])
    shares_norm = "sync_batchnorm" in settings
    if isinstance(engine, SingleEngine):
        settings.pop("sync_batchnorm", None)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(96, 3, 16, 16, generator=generator)
    data = TensorDataset(images, torch.arange(96) % 4)
    task = Pixels(shares_norm)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=3,
            engine=engine,
            lr_scaling="none",
            run_dir=folder if os.environ.get("RANK", "0") == "0" else None,
            log_every_n_steps=10**6,
            **QUIET,
            **settings,
        )
        trainer.fit(task, DataLoader(data, batch_size, pin_memory=device == "cuda"))
    return torch.cat([value.detach().flatten().float().cpu() for value in task.parameters()])


def main(device: str, folder: Path) -> None:
    """Run the cases on this rank."""
    for number, case in enumerate(CASES):
        answer: Tensor | str
        try:
            with over_gloo():
                answer = weights_of(DDPEngine(device=device), 8, device, case)  # type: ignore[arg-type]
        except Exception as error:  # of any kind: the next case is tried all the same
            answer = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if os.environ["RANK"] == "0":
            torch.save(answer, folder / f"{number}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
