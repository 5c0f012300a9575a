"""Finders under real launchers:
all ranks agree, the curve is exact, and nothing of the user's is changed, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.found import take_found
from tests.helpers.launching import Command
from tests.parallel.starts import ROOT

pytestmark = pytest.mark.parallel

FIND = """
import random
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from recipes.image_classifier import ImageClassifier
from tests.helpers.found import keep_found
from trainkit.config import compose
from trainkit.launch.environment import read_launcher
from trainkit.extensions.find.batch import find_batch
from trainkit.extensions.script.subject import ConfigSubject

RANK, ENGINE = read_launcher().rank, sys.argv[1]


class Net(trainkit.Task):
    def __init__(self, dropout):
        super().__init__()
        self.net, self.seen = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 1)), []
        self.net[1].eval()

    def train(self, mode=True):
        super().train(mode)
        self.net[1].eval()  # the same losses however samples are split
        return self

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0][:, 0].tolist())
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def held(task, generator):
    numbers = np.random.get_state()
    tensors = [*task.state_dict().values(), torch.get_rng_state(), generator.get_state(), torch.tensor(numbers[1])]
    return [t.tolist() for t in tensors], repr(random.getstate()), repr(numbers[2:])


def trainer(run_dir):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return trainkit.Trainer(engine=ENGINE, max_epochs=2, run_dir=run_dir, precision="64-true", lr_scaling="none", **quiet)


def made(dropout=0.5):
    torch.manual_seed(RANK)  # differs: nothing may be sent to the user's own task
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(42, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = DataLoader(TensorDataset(x), 16 // read_launcher().world_size, shuffle=True, generator=generator)
    return Net(dropout), data, generator


task, data, generator = made()
trainer("plain").fit(task, data)
again, data, generator = made()
before = held(again, generator)
curve = trainkit.find_lr(again, data, trainer=trainer("none"), num_training=12, min_lr=1e-4, max_lr=0.1)
result = {"rank": RANK, "kept": held(again, generator) == before, "lrs": curve.lrs}
trainer("after").fit(again, data)
result["same_order"] = again.seen == task.seen
pairs = zip(again.state_dict().values(), task.state_dict().values())
result["same_weights"] = all(torch.equal(a, b) for a, b in pairs)

torch.manual_seed(0)
exact, data, _ = made(0.0)
with torch.no_grad():
    for p in exact.parameters():
        p.copy_(torch.linspace(-0.5, 0.6, p.numel()).reshape(p.shape))
result["losses"] = trainkit.find_lr(exact, data, trainer=trainer("none"), num_training=12, min_lr=1e-4, max_lr=0.1).losses

plain = ImageClassifier.training_step


def step(self, batch, batch_idx):
    if len(batch[0]) > 40 and RANK == read_launcher().world_size - 1:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return plain(self, batch, batch_idx)


ImageClassifier.training_step = step
jobs = []
compose.run("find", ["conf=mlp", f"engine={ENGINE}"], RANK == 0, jobs.append)
found = find_batch(ConfigSubject(jobs[0], []), memory_gb=1000)
result["batch"] = [found.largest, found.choice(), [[one.batch_size, one.failed] for one in found.tried]]
keep_found(RANK, result)
"""


def found(engine: str, command: Command, folder: Path) -> list[dict[str, Any]]:
    """Return what each rank has found."""
    (folder / "find.py").write_text(FIND)
    start = {
        "horovod": "horovodrun -np 2 python",
        "ddp": "torchrun --nproc-per-node 2",
        "single": "python",
    }[engine]
    done = command(f"{start} find.py {engine}", timeout_s=240, PYTHONPATH=str(ROOT))
    assert done.code == 0, done.text
    return take_found(folder)


def test_finders_agree_over_ranks_and_leave_no_trace(command: Command, tmp_path: Path) -> None:
    """Weights, random numbers and the order of data are as before, and a fit afterwards is that
    without a finder; two ranks measure the losses of one; a rank that is out of memory is known by
    the other."""
    (alone,) = found("single", command, tmp_path)
    assert alone["kept"] and alone["same_order"] and alone["same_weights"]
    for engine in ("horovod", "ddp"):
        ranks = found(engine, command, tmp_path)
        assert len(ranks) == 2
        for rank in ranks:
            assert rank["kept"] and rank["same_order"] and rank["same_weights"]
            assert (
                rank["losses"] == pytest.approx(alone["losses"], rel=1e-9)
                and rank["lrs"] == alone["lrs"]
            )
            assert rank["losses"] == ranks[0]["losses"]
            largest, choice, tried = rank["batch"]
            assert 38 <= largest <= 40 and choice == [32, 1]
            assert (
                all(failed == ([1] if size > 40 else []) for size, failed in tried)
                and max(tried)[0] == 64
            )


SETTINGS = """
import os
import sys

import torch

from recipes.image_classifier import ImageClassifier
from tests.helpers.found import keep_found
from trainkit.config import compose
from trainkit.errors import ConfigError
from trainkit.launch.environment import read_launcher
from trainkit.extensions.find import wire
from trainkit.extensions.find.wire import find_settings
from trainkit.extensions.script.subject import ConfigSubject

RANK, ENGINE = read_launcher().rank, sys.argv[1]
NAMES, seen = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"), []


def begins(self):
    sums = len(self.trainer.engine._reducer._buckets)
    seen.append([sums, *(os.environ.get(name) for name in NAMES)])


def job(*words):
    jobs = []
    compose.run("find", ["conf=mlp", *words], RANK == 0, jobs.append)
    return ConfigSubject(jobs[0], words)


def refused(*words):
    try:
        find_settings(job(*words))
    except ConfigError as error:
        return str(error)


ImageClassifier.on_train_start = begins
wire._ROUNDS = 2 if ENGINE == "ddp" else 1
numbers = torch.get_rng_state()
found = find_settings(job(f"engine={ENGINE}", "task.model.width=1024", "task.model.depth=3"), steps=2)
typed = [" ".join(f"engine.{name}={value}" for name, value in one.options.items()) for one in found.tried]
tried = [[one.refused, one.step_s > one.waits_s > 0] for one in found.tried]
result = {"seen": [*seen], "tried": [[line, *rest] for line, rest in zip(typed, tried)]}
result["bytes"], result["kept"] = found.gradient_bytes, torch.equal(numbers, torch.get_rng_state())
result["environment"] = [os.environ.get(name) for name in NAMES]
if ENGINE == "ddp":
    result["refused"] = [refused("engine=fsdp"), refused("engine=ddp", "communication=powersgd")]
else:
    os.environ["HOROVOD_CYCLE_TIME"] = "1"
    result["skipped"] = find_settings(job("engine=horovod", "engine.num_groups=2"), steps=1).skipped
keep_found(RANK, result)
"""


def test_settings_of_the_wire_are_really_tried(command: Command, tmp_path: Path) -> None:
    """Each option of an engine on the job itself, which is restarted with it;
    afterwards nothing of it is left.
    """
    (tmp_path / "settings.py").write_text(SETTINGS)
    both: dict[str, list[dict[str, Any]]] = {}
    for engine, start in (
        ("horovod", "horovodrun -np 2 python"),
        ("ddp", "torchrun --nproc-per-node 2"),
    ):
        done = command(f"{start} settings.py {engine}", timeout_s=240, PYTHONPATH=str(ROOT))
        assert done.code == 0, done.text
        both[engine] = take_found(tmp_path)
        first, second = both[engine]
        assert [row[:2] for row in first["tried"]] == [row[:2] for row in second["tried"]]
        assert all(row[2] for row in first["tried"] + second["tried"])
        assert (
            first["kept"]
            and second["kept"]
            and first["environment"] == second["environment"] == [None, None]
        )
        assert first["seen"] == second["seen"] and first["bytes"] == 9_228_328
    ddp, horovod = both["ddp"][0], both["horovod"][0]
    assert [row[0] for row in ddp["tried"][:3]] == [
        "",
        "engine.bucket_cap_mb=1.0",
        "engine.bucket_cap_mb=5.0",
    ]
    assert [row[0].split("compression=")[-1] for row in ddp["tried"][3:]] == ["fp16", "bf16"]
    assert [sums for sums, *_ in ddp["seen"][:6]] == [1, 5, 2] * 2
    assert "engine=fsdp gathers weights unit by unit" in ddp["refused"][0]
    assert "find settings measures exact gradients" in ddp["refused"][1]
    names = [row[0] for row in horovod["tried"]]
    assert names[:3] == ["", "engine.num_groups=1", "engine.num_groups=4"] and names[-1].endswith(
        "engine.compression=fp16"
    )
    assert [sums for sums, *_ in horovod["seen"][:3]] == [8, 1, 4]
    assert {fusion for _, fusion, _ in horovod["seen"]} == {None, str(2 * 2**20)}
    assert {cycle for _, _, cycle in horovod["seen"]} == {None, "0.1", "5"}
    assert horovod["skipped"] == [
        "engine.cycle_time_ms: HOROVOD_CYCLE_TIME is set in the environment, and wins."
    ]
