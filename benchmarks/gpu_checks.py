"""Whether training on one GPU is right: gpu.py's parts that compare weights and time nothing.

two_ranks      ddp's cases on two ranks of one GPU, beside one process
resumed        a run with dropout that ends in the middle of an epoch and is resumed, bit for bit
compiled_pair  two modules under CUDA graphs, with accumulation, beside eager ones
unit_tests     the unit tests, which take the GPU by themselves
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.data import QUIET
from benchmarks.gpu_two_ranks import CASES, weights_of
from trainkit import ModelCheckpoint, Task, Trainer
from trainkit.engine.single import SingleEngine

ROOT = Path(__file__).parents[1]
UNITS = ("device", "engine", "optim", "run", "checkpoint", "callbacks", "metrics", "data")


class Pair(Task):
    """Two modules in a row, with dropout between them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout))
        self.head = nn.Linear(64, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        loss = cross_entropy(self.head(self.encoder(batch[0])), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the loss."""
        self.log("val/loss", cross_entropy(self.head(self.encoder(batch[0])), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


def _rows() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    data = TensorDataset(torch.randn(128, 32, generator=generator), torch.arange(128) % 4)
    return DataLoader(data, 8, shuffle=True)


def _fit(device: torch.device, folder: str, dropout: float, **settings: Any) -> Tensor:
    ckpt_path = settings.pop("ckpt_path", None)
    task = Pair(dropout)
    trainer = Trainer(
        engine=SingleEngine(device=device.type),  # type: ignore[arg-type]
        run_dir=folder,
        log_every_n_steps=10**6,
        **QUIET | settings,
    )
    trainer.fit(task, _rows(), _rows(), ckpt_path=ckpt_path)
    return torch.cat([value.detach().flatten().cpu() for value in task.parameters()])


def resumed(device: torch.device) -> float:
    """Return how far the weights of a resumed run are from those of one that never ended."""
    saves = {"callbacks": [ModelCheckpoint(save_last=True)], "enable_checkpointing": True}
    with tempfile.TemporaryDirectory() as folder:
        whole = _fit(device, f"{folder}/whole", 0.2, max_steps=40)
        _fit(device, f"{folder}/run", 0.2, max_steps=21, **saves)
        again = _fit(device, f"{folder}/run", 0.2, max_steps=40, ckpt_path="last", **saves)
    return (whole - again).abs().max().item()


def compiled_pair(device: torch.device) -> float:
    """Return how far two modules under CUDA graphs are from eager ones: accumulation, validation."""
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2, "limit_val_batches": 2}
    with tempfile.TemporaryDirectory() as folder:
        eager = _fit(device, f"{folder}/eager", 0.0, **settings)
        graphs = _fit(device, f"{folder}/graphs", 0.0, compile="reduce-overhead", **settings)
    return (eager - graphs).abs().max().item()


def two_ranks(device: torch.device) -> list[list[Any]]:
    """Return, of each case, its name, how far two ranks are from one process, and the error."""
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "-m", "benchmarks.gpu_two_ranks", device.type, folder]
        # Both ranks take this GPU, and gloo's sums go through the host.
        environment = {**os.environ, "TRAINKIT_GPU": "0", "OMP_NUM_THREADS": "1"}
        said = ""
        try:
            subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, check=True, timeout=180
            )
        except subprocess.SubprocessError as error:
            said = f"{error} {(error.stderr or b'').decode(errors='replace')[-200:]}"  # type: ignore[attr-defined]
        for number, name in enumerate(CASES):
            file = Path(folder, f"{number}.pt")
            both = torch.load(file) if file.is_file() else f"no answer: {said}"
            if isinstance(both, str):
                rows.append([name, None, both])
                continue
            engine = SingleEngine(device=device.type)  # type: ignore[arg-type]
            one = weights_of(engine, 16, device.type, name)
            rows.append([name, (both - one).abs().max().item(), ""])
    return rows


def unit_tests(seconds: float, folders: tuple[str, ...] = UNITS) -> list[Any]:
    """Return the passed, the failed and the names of failed unit tests.

    Raises:
        RuntimeError: pytest says nothing, as without pytest-xdist.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-n", str(min(12, len(os.sched_getaffinity(0)))), "--timeout", "90"]
    command += [f"tests/unit/{folder}" for folder in folders]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=seconds
        )
        text = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode(errors="replace")
    counts = {
        word: int(match.group(1))
        for word in ("passed", "failed")
        if (match := re.search(rf"(\d+) {word}", text))
    }
    failed = re.findall(r"^FAILED (\S+)", text, re.MULTILINE)
    if not counts:
        raise RuntimeError(" ".join(text.split())[-200:])
    return [counts.get("passed", 0), counts.get("failed", 0), ", ".join(failed[:20])]
