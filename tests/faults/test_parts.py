"""Faults while ranks write a checkpoint in parts:
a rank is killed, or its disk is full for a while.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.parallel.starts import ROOT
from trainkit.checkpoint.format import read_state

pytestmark = pytest.mark.parallel

FIT = """
import json
import os
import resource
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainkit

FULL = len(sys.argv) > 1
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is an error, as on a full disk


class Wide(trainkit.Task):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(10)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).pow(2).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if FULL and self.trainer.global_rank == 1 and self.trainer.global_step in (3, 6):
            most = 2**20 if self.trainer.global_step == 3 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
keeper = trainkit.ModelCheckpoint(every_n_train_steps=1, every_n_epochs=None, save_top_k=-1)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = trainkit.Trainer(engine="fsdp", max_steps=8, run_dir="run", callbacks=keeper, **quiet)
data = TensorDataset(torch.randn(64, 1000, generator=torch.Generator().manual_seed(1)))
trainer.fit(Wide(), DataLoader(data, 4, shuffle=True), ckpt_path="auto")
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start two ranks in a folder."""
    (folder / "fit.py").write_text(FIT)
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "fit.py",
        *arguments,
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        line, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(job: subprocess.Popen[str]) -> str:
    """Wait for a job's end; return its output."""
    text, _ = job.communicate(timeout=300)
    assert job.returncode == 0, text
    return text


def last(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the last checkpoint."""
    return read_state(folder / "run" / "checkpoints" / "last")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after all steps, if nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(start(folder))
    return last(folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_it_writes(
    rank: int, tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """What was being written is no checkpoint;
    the run resumes from the one before, to the same bits.
    """
    job = start(tmp_path)
    checkpoints, end = tmp_path / "run" / "checkpoints", time.monotonic() + 200
    while not (
        drafts := [
            d
            for d in checkpoints.glob(".*.draft")
            if (d / f"rank-{rank}-of-2.safetensors").exists()
        ]
    ) or (len(list(checkpoints.glob("*step=*"))) < 2):
        assert time.monotonic() < end and job.poll() is None, job.communicate()
        time.sleep(0.001)
    os.kill(int((tmp_path / f"pid-{rank}").read_text()), signal.SIGKILL)
    job.communicate(timeout=120)
    assert job.returncode != 0
    left = {path.name for path in checkpoints.glob("*step=*") if (path / "manifest.json").is_file()}
    assert left and not any((draft / "manifest.json").is_file() for draft in drafts)
    finish(start(tmp_path))
    assert not list(checkpoints.glob(".*.draft"))
    weights = last(tmp_path)
    assert all(torch.equal(weights[name], value) for name, value in undisturbed.items())


def test_a_disk_that_is_full_on_one_rank(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """Checkpoints that rank 1 cannot write are reported and left out;
    training continues, and the next ones are whole.
    """
    text = finish(start(tmp_path, "full"))
    checkpoints = tmp_path / "run" / "checkpoints"
    steps = sorted(int(path.name.rpartition("step=")[2]) for path in checkpoints.glob("*step=*"))
    assert set(steps) & {3, 4} == set() and {1, 2, 7, 8} <= set(steps), (steps, text)
    assert "rank 1" in text and "File too large" in text
    assert not list(checkpoints.glob(".*.draft"))
    for step in steps:
        manifest = next(checkpoints.glob(f"*step={step}")) / "manifest.json"
        assert len(json.loads(manifest.read_text())["files"]) == 3
    weights = last(tmp_path)
    assert all(torch.equal(weights[name], value) for name, value in undisturbed.items())
