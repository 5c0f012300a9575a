"""callbacks=balance under real launchers:
samples are split over ranks by measured speed, and a resumed run splits alike.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.found import take_found
from tests.helpers.launching import Command
from tests.parallel.starts import ROOT

pytestmark = pytest.mark.parallel

FIT = """
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from tests.helpers.found import keep_found
from trainkit.callbacks.step_clock import StepClock
from trainkit.launch.environment import read_launcher

SAMPLE_S = (1.0, 3.0)[read_launcher().rank]


class Timed(trainkit.Task):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.now, self.sizes = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)), 0.0, []

    def training_step(self, batch, batch_idx):
        self.sizes.append(len(batch[0]))
        self.now += SAMPLE_S * len(batch[0])  # moves its own clock: no other job on this machine changes the result
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit(run_dir, max_steps, ckpt_path=None):
    task, balance = Timed(), trainkit.Balance(every_n_steps=2, damping=0.0)
    keep = trainkit.ModelCheckpoint(every_n_train_steps=5, every_n_epochs=1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [StepClock(now=lambda: task.now), balance, keep]
    trainer = trainkit.Trainer(engine=sys.argv[1], max_steps=max_steps, callbacks=callbacks, run_dir=run_dir, **quiet)
    data = TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(1)))
    trainer.fit(task, DataLoader(data, 8, shuffle=True), ckpt_path=ckpt_path)
    weights = torch.cat([p.detach().flatten() for p in task.parameters()]).tolist()
    return {"weights": weights, "sizes": task.sizes, "changes": balance.changes, "shares": trainer.run.batch_plan.rank_shares}


found = {"whole": fit("whole", 10), "cut": fit("cut", 5), "resumed": fit("cut", 10, "last")}
keep_found(read_launcher().rank, found)
"""


@pytest.mark.parametrize("engine", ["horovod", "ddp"])
def test_ranks_have_shares_by_speed_and_resume_alike(
    engine: str, command: Command, tmp_path: Path
) -> None:
    """12 of 16 samples for the rank that is three times as fast; a run that resumes ends bit for
    bit like one that never stopped, dropout included."""
    (tmp_path / "fit.py").write_text(FIT)
    start = "horovodrun -np 2 python" if engine == "horovod" else "torchrun --nproc-per-node 2"
    done = command(f"{start} fit.py {engine}", timeout_s=300, PYTHONPATH=str(ROOT))
    assert done.code == 0, done.text
    results = take_found(tmp_path)
    for rank, size in zip(results, (12, 4), strict=True):
        assert rank["whole"]["changes"] == [[2, [12, 4]]] and rank["resumed"]["changes"] == []
        assert rank["whole"]["sizes"] == [8] * 2 + [size] * 8
        assert rank["resumed"]["sizes"] == [size] * 5
        assert rank["resumed"]["weights"] == rank["whole"]["weights"] != rank["cut"]["weights"]
        assert rank["resumed"]["shares"] == rank["whole"]["shares"] == "3:1"
    # whole, and cut
    assert done.out.count("Balance: after step 2 samples are split 12:4 (even before)") == 2
    assert "rank_shares was" not in done.out, "the resumed run begins with the checkpoint's shares"
