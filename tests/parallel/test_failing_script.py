"""A script that ends on one rank: by an error in the middle of a step, while its sums are under way,
or by sys.exit.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.helpers.launching import run_command
from tests.parallel.starts import ROOT

SCRIPT = """
import atexit
import os
import signal
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Task, Trainer
from trainkit.engine.ddp.engine import DDPEngine


ended = []


def end_once():  # as optree's, which torch may import late, and whose second run is an error
    assert not ended, "a second end"
    ended.append(True)


class Fails(Task):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if os.environ["RANK"] == "1":  # in its data, say, and without trainkit's handler of signals
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(600)
        hidden = self.first(batch[0])
        hidden.register_hook(self.fail)  # the last layer's sums have started
        return self.last(hidden).mean()

    def fail(self, grad):
        atexit.register(end_once)
        raise ValueError("a mistake of the user's")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


data = DataLoader(TensorDataset(torch.zeros(8, 4)), 4)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
Trainer(max_epochs=1, run_dir="run", engine=DDPEngine(bucket_cap_mb=1e-5), **quiet).fit(Fails(), data)
"""


def test_a_script_that_fails_in_a_step_ends(tmp_path: Path) -> None:
    """It does not wait at its exit for a sum that the other rank never starts: torchrun sees that
    it has failed, with its own error, and ends the other.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    # by name: the tests' own start of torchrun ends scripts in another way than Python does
    line = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 script.py"
    done = run_command(line, tmp_path, timeout_s=120)
    assert done.code == 1
    assert "ValueError: a mistake of the user's" in done.err
    assert "exitcode  : 1 " in done.err
    assert "a second end" not in done.err


LEAVES = """
import os
import sys
import tempfile

from tests.helpers.toy import Line, loader, quiet


class Leaves(Line):
    def on_train_epoch_start(self):
        if self.current_epoch == 1 and os.environ["RANK"] == "1":
            sys.exit(3)


quiet(tempfile.mkdtemp(), max_epochs=3).fit(Leaves(), loader(64))
"""


def test_a_rank_that_leaves_a_fit_is_named(tmp_path: Path) -> None:
    """After sys.exit(3) on one rank torchrun reports that rank and its code, and not another that
    has lost it: it leaves before its connections end.
    """
    (tmp_path / "script.py").write_text(LEAVES)
    line = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 script.py"
    done = run_command(line, tmp_path, timeout_s=120, PYTHONPATH=str(ROOT))
    assert done.code == 1
    first = done.err.partition("Root Cause")[2]
    assert "rank      : 1 " in first
    assert "exitcode  : 3 " in first
