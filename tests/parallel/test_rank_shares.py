"""trainer.rank_shares: ranks of unequal speed take unequal parts of each step,
and nothing else changes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.found import take_found
from tests.helpers.launching import Command
from tests.helpers.pages import part
from tests.parallel.starts import ROOT

pytestmark = pytest.mark.parallel

FIT = """
import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from tests.helpers.found import keep_found
from trainkit.launch.environment import read_launcher


class Line(trainkit.Task):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.seen = nn.Linear(3, 1), 0

    def training_step(self, batch, batch_idx):
        self.seen += len(batch[0])
        return self.net(batch[0]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.net(batch[0]).pow(2).mean())

    def on_fit_end(self):
        weight = self.net.weight
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        self.found = {"weights": whole.flatten().tolist(), "seen": self.seen}
        self.found["value"] = float(self.trainer.callback_metrics["val/loss"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


data = TensorDataset(torch.randn(70, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
found = {}
for name, shares in json.loads(sys.argv[2]).items():
    task, quiet = Line(), {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = trainkit.Trainer(
        engine=sys.argv[1], max_epochs=2, global_batch_size=32, precision="64-true", rank_shares=shares, run_dir=name, **quiet
    )
    trainer.fit(task, DataLoader(data, 8, shuffle=True), DataLoader(data, 8))
    found[name] = task.found
keep_found(read_launcher().rank, found)
"""


@pytest.mark.parametrize("engine", ["horovod", "ddp", "fsdp"])
def test_shares_change_no_result(engine: str, command: Command, tmp_path: Path) -> None:
    """Weights and metrics are those of even shares up to rounding,
    and of shares that are equal bit for bit; 3:1 splits 3:1.
    """
    (tmp_path / "fit.py").write_text(FIT)
    start = "horovodrun -np 2 python" if engine == "horovod" else "torchrun --nproc-per-node 2"
    shares = json.dumps({"even": None, "alike": [2, 2], "uneven": [3, 1]}).replace(" ", "")
    done = command(f"{start} fit.py {engine} '{shares}'", timeout_s=300, PYTHONPATH=str(ROOT))
    assert done.code == 0, done.text
    ranks = take_found(tmp_path)
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["alike"] == rank["even"]
        assert rank["uneven"]["weights"] == pytest.approx(rank["even"]["weights"], abs=1e-13)
        assert rank["uneven"]["value"] == pytest.approx(rank["even"]["value"], rel=1e-12)
    # of 64 + 6, twice: 48 + 4 and 16 + 2
    assert [rank["uneven"]["seen"] for rank in ranks] == [104, 36]


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (
            "[3]",
            "trainer.rank_shares is [3], and there are 2 ranks; it must have a number for each.",
        ),
        (
            "[3,0]",
            "trainer.rank_shares is [3, 0]; it must be one whole number of 1 or more for each rank",
        ),
        ("[]", "trainer.rank_shares is []; it must be one whole number of 1 or more for each rank"),
        ("[1.5,1]", "trainer.rank_shares is [1.5, 1]; it must be"),
    ],
)
def test_shares_that_do_not_fit_are_refused(shares: str, message: str, command: Command) -> None:
    """In one message, before training."""
    line = (
        "torchrun --nproc-per-node 2 -m trainkit fit conf=mlp trainer.max_steps=2"
        f" 'trainer.rank_shares={shares}'"
    )
    done = command(line, timeout_s=300)
    assert done.code != 0
    assert done.err.count(message) == 1, done.text


def test_the_pages_commands_run(command: Command) -> None:
    """Those of docs/communication.md; those with shares print them."""
    page = part(ROOT / "docs" / "communication.md", "Ranks of unequal speed")
    lines = [
        line
        for block in re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(lines) == 4
    for line in lines:
        done = command(line + " trainer.max_steps=2", timeout_s=300)
        assert done.code == 0, done.text
        assert ("shares 3:1" in done.out) == ("rank_shares" in line), done.text


def test_a_resumed_run_reports_other_shares(command: Command) -> None:
    """The contract holds the shares; a run that resumes with others names both."""
    line = "torchrun --nproc-per-node 2 -m trainkit fit conf=mlp run_dir=run"
    done = command(f"{line} trainer.max_steps=2 'trainer.rank_shares=[3,1]'", timeout_s=300)
    assert done.code == 0 and "shares 3:1" in done.out, done.text
    done = command(f"{line} trainer.max_steps=4 ckpt_path=last", timeout_s=300)
    assert done.code == 0 and "rank_shares was 3:1, is even" in done.out, done.text
