"""`python -m trainkit replay`: parsing of the command line, and a replay of a run from a config."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from trainkit.cli import run
from trainkit.extensions.capsule import command as replay

TASK = '''
"""A task with dropout whose data has one sample that is not finite."""

import torch
from torch import nn

import trainkit


class Poisoned(trainkit.Task):
    def __init__(self, width=8, lr=0.1):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(3, width), nn.Dropout(0.5), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self):
        x = torch.load("data.pt")
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
'''
CONF = """
defaults: [_base, _self_, {override logger: none}]
task: {_target_: poison.Poisoned, width: 8}
trainer: {max_epochs: 1, enable_progress_bar: false, enable_checkpointing: false}
run_dir: runs/one
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with its own task and config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "poison", raising=False)
    return tmp_path


def train(here: Path) -> str:
    """Train with a poisoned sample; return the capsule's path."""
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    x[13, 1] = float("nan")
    torch.save(x, here / "data.pt")
    (here / "poison.py").write_text(TASK)
    (here / "conf").mkdir()
    (here / "conf" / "poison.yaml").write_text(CONF)
    assert run.main("fit", ["conf=poison", "callbacks=capsule"]) == 0
    (here / "data.pt").unlink()
    return "runs/one/capsules/step=3-rank=0"


def test_a_run_is_taken_again_without_its_data(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Task is built from the capsule's config; the data is deleted, and nothing is written."""
    capsule = train(here)
    assert f"python -m trainkit replay {capsule}" in capsys.readouterr().out
    files = sorted(path for path in here.rglob("*") if "__pycache__" not in path.parts)
    assert replay.main("replay", [capsule]) == 0
    out = capsys.readouterr().out
    assert "recorded nan, now nan: equal bit for bit" in out
    assert "batch[0] is not finite in row 1: sample 13 of the data set" in out
    assert "the first module with a non-finite output is net.0 (Linear)" in out
    assert sorted(path for path in here.rglob("*") if "__pycache__" not in path.parts) == files


def test_values_of_the_config_can_be_changed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """task.X and trainer.X are checked like those of any config."""
    capsule = train(here)
    assert (
        replay.main(
            "replay", [capsule, "update=true", "task.lr=0.5", "trainer.detect_anomaly=true"]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "returned nan values in its 0th output" in out  # what detect_anomaly says
    assert replay.main("replay", [capsule, "task.width=16"]) == 1
    assert "does not fit Poisoned" in capsys.readouterr().err
    assert replay.main("replay", [capsule, "task.widht=16"]) == 2
    assert "task.widht is not a setting. Did you mean 'width'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            [],
            2,
            (
                "No capsule is given. Give one: python -m trainkit replay"
                " runs/mine/capsules/step=N-rank=R"
            ),
        ),
        (["a", "b"], 2, "2 capsules are given (a, b)."),
        (
            ["a", "updat=true"],
            2,
            (
                "'updat' is no setting of replay. Did you mean 'update'? Use update, pdb, weights,"
                " trust,"
            ),
        ),
        (["a", "update=yes"], 2, "update is 'yes'; it must be true or false."),
        (["a", "pdb=true", "pdb=true"], 2, "pdb is given twice."),
        (
            ["no/such/capsule"],
            1,
            "capsule is 'no/such/capsule', and there is no such folder. Capsules are folders",
        ),
        (
            ["runs/one/capsules/step=1-rank=0"],
            1,
            "capsule is 'runs/one/capsules/step=1-rank=0', and there is no such folder.",
        ),
    ],
)
def test_a_mistake_in_the_command_is_named(
    arguments: list[str], code: int, words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each mistake ends with one sentence, and nothing is written."""
    assert replay.main("replay", arguments) == code
    assert capsys.readouterr().err.startswith(f"Error: {words}")
    assert list(here.iterdir()) == []


def test_a_folder_may_have_any_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An existing path is a folder, even if it looks like a setting."""
    (here / "my=capsule").mkdir()
    assert replay.main("replay", ["my=capsule"]) == 1
    assert "'my=capsule' is no capsule" in capsys.readouterr().err


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """--help lists the settings, and ends with exit code 0."""
    assert replay.main("replay", ["--help"]) == 0
    out = capsys.readouterr().out
    assert " CAPSULE " in out and all(
        f"\n  {key}=" in out for key in ("update", "pdb", "weights", "trust")
    )
