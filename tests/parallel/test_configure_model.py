"""Layers that configure_model makes under engine=fsdp:
no rank ever holds all of them, nor all of a file's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.launching import Command
from tests.parallel.starts import ROOT

pytestmark = pytest.mark.parallel

FIT = """
import json
import resource
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainkit
from trainkit.cli.guard import fail
from trainkit.errors import TrainkitError
from trainkit.launch.environment import read_launcher

LAYERS, WIDTH, WEIGHTS = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Wide(trainkit.Task):
    def configure_model(self):
        self.before = most()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        if WEIGHTS == "ask":
            self.scale = self.layers[0].weight.abs().max().item()

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))

    def on_fit_start(self):
        grown, parts = most() - self.before, sum(p.to_local().numel() for p in self.parameters())
        first = self.layers[0].weight.full_tensor()[0, :3].tolist()
        self.print(json.dumps({"grown": grown, "held": 4 * parts, "first": first}))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
trainer = trainkit.Trainer(engine="fsdp", max_steps=1, run_dir="run", **quiet)
loader = DataLoader(TensorDataset(torch.ones(4, WIDTH)), 2)
try:
    if WEIGHTS.startswith("validate="):
        print(json.dumps(trainer.validate(Wide(), loader, ckpt_path=WEIGHTS.removeprefix("validate="))))
    else:
        trainer.fit(Wide(), loader, init_weights=WEIGHTS if WEIGHTS.endswith(".pt") else None)
except TrainkitError as error:
    raise SystemExit(fail(error, read_launcher(), str(error), 1))
"""


def fit(
    command: Command, folder: Path, layers: int, width: int, weights: str = "-", code: int = 0
) -> str:
    """Run the script on two ranks; return its output."""
    (folder / "wide.py").write_text(FIT)
    done = command(
        f"torchrun --nproc-per-node 2 wide.py {layers} {width} {weights}",
        timeout_s=300,
        PYTHONPATH=str(ROOT),
    )
    assert (done.code == 0) == (code == 0), done.text
    return done.text


def result(text: str) -> dict[str, Any]:
    """Return what rank 0 printed."""
    facts: dict[str, Any]
    # ranks may print on one line
    facts, _ = json.JSONDecoder().raw_decode(text[text.index('{"') :])
    return facts


def test_no_rank_holds_all_weights(command: Command, tmp_path: Path) -> None:
    """Until the fit begins, a rank's memory grows by its half of 400 MB;
    what one small layer takes (imports) is taken off.
    """
    small, large = (result(fit(command, tmp_path, layers, 1000)) for layers in (1, 100))
    assert (small["held"], large["held"]) == (2_000_000, 200_000_000)
    grown = large["grown"] - small["grown"]
    assert 0.9 * large["held"] < grown < 1.3 * large["held"], (small, large)


def test_weights_of_a_file_are_read_in_parts(command: Command, tmp_path: Path) -> None:
    """init_weights fills each rank's part; another layer in the file is refused by one message."""
    weights = {f"layers.{i}.weight": torch.randn(8, 8) for i in range(3)}
    torch.save(weights, tmp_path / "there.pt")
    text = fit(command, tmp_path, 3, 8, "there.pt")
    assert result(text)["first"] == weights["layers.0.weight"][0, :3].tolist()
    text = fit(command, tmp_path, 4, 8, "there.pt", code=2)
    assert (
        text.count("missing in the file: layers.3.weight [8, 8]") == 1
        and 'wide.py", line' not in text
    )


def test_a_file_is_validated(command: Command, tmp_path: Path) -> None:
    """ckpt_path may be a file of weights; each rank takes its part."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    torch.save(
        {f"layers.{name}": value for name, value in model.state_dict().items()},
        tmp_path / "there.pt",
    )
    values = result(fit(command, tmp_path, 3, 8, "validate=there.pt"))
    with torch.no_grad():
        assert values["val/loss"] == pytest.approx(
            model(torch.ones(1, 8)).pow(2).mean().item(), rel=1e-5
        )


def test_a_value_that_is_asked_for_is_refused_once(command: Command, tmp_path: Path) -> None:
    """No layer has a value yet: one message says what to do."""
    text = fit(command, tmp_path, 2, 8, "ask", code=2)
    assert (
        text.count("configure_model needs the value of a tensor (item)") == 1
        and 'wide.py", line' not in text
    )
