"""Configs of Lightning's users: each key, class and flag that differs says what to write here."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainkit.__main__ import main
from trainkit.extensions.names.lightning_configs import TARGETS
from trainkit.safety.tracebacks import text_of

ROOT = Path(__file__).parents[3]
BLOCKS = re.findall(
    r"```yaml\n(.*?)```", (ROOT / "docs/lightning.md").read_text().partition("## Configs")[2], re.S
)
MINE = """
import torch
import trainkit
from torch.utils.data import DataLoader, TensorDataset

class Net(trainkit.Task):
    def __init__(self, width=8):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Numbers(trainkit.DataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 2)), self.batch_size)

    val_dataloader = train_dataloader

class LightningDataModule:
    __module__ = "lightning.pytorch.core"

class Theirs(LightningDataModule):
    pass
"""


@pytest.fixture
def said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """A function that writes a config, runs a command with it and returns what is printed."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "conf").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(config: Any, *arguments: str) -> str:
        text = config if isinstance(config, str) else yaml.safe_dump(config, sort_keys=False)
        (tmp_path / "conf/mine.yaml").write_text(text)
        monkeypatch.setattr("sys.argv", ["trainkit", *(arguments or ("fit", "conf=mine"))])
        code = main()
        printed = capsys.readouterr()
        assert code == (2 if "Error: " in printed.err else 0)
        return printed.out + printed.err

    return run


def test_the_pages_file_of_lightning_is_refused_part_by_part(said: Any) -> None:
    """Until it is the page's second file, which trains."""
    before, after = (yaml.safe_load(block) for block in BLOCKS[:2])
    before["defaults"] = after["defaults"]
    assert "seed_everything: In its place: seed." in said(before)
    before["seed"] = before.pop("seed_everything")
    assert "model: In its place: task." in said(before)
    before["task"] = before.pop("model")
    for key in ("data", "task"):
        assert f"{key} has no _target_" in (text := said(before))
        assert "class_path is _target_ here" in text
        before[key] = {"_target_": before[key]["class_path"], **before[key]["init_args"]}
    assert "callbacks are a group of their own" in said(before)
    (stop,) = before["trainer"].pop("callbacks")
    before["callbacks"] = {"early_stopping": {"_target_": stop["class_path"], **stop["init_args"]}}
    assert "In its place: trainkit.callbacks.EarlyStopping." in said(before)
    before["callbacks"]["early_stopping"]["_target_"] = "trainkit.callbacks.EarlyStopping"
    assert before == after
    assert "3 epochs of 1 step" in said(BLOCKS[1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fit", "--config", "config.yaml"), "is conf=NAME here"),
        (("fit", "--print_config"), "In its place: --cfg job."),
        (("fit", "--model", "mine.Net"), "task._target_=my.Model"),
        (("fit", "conf=mine", "trainer._target_=lightning.Trainer"), "Leave it out: the Trainer"),
        (
            ("fit", "conf=mine", "~data.batch_size", "data._target_=mine.Theirs"),
            "Make trainkit.Data",
        ),
        (("fit", "conf=mine", "task_name=a"), "Leave it out. run_dir is the run's folder"),
    ],
)
def test_flags_and_keys_say_what_to_write(
    arguments: tuple[str, ...], words: str, said: Any
) -> None:
    """At the command line too."""
    assert words in said(BLOCKS[1], *arguments)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("lightning.pytorch.callbacks.ModelCheckpoint", "trainkit.callbacks.ModelCheckpoint."),
        ("pytorch_lightning.loggers.wandb.WandbLogger", "trainkit.loggers.WandbLogger."),
        ("lightning.pytorch.callbacks.RichProgressBar", "In its place: ProgressBar."),
        ("lightning.pytorch.strategies.DDPStrategy", "In its place: Trainer(engine=...)."),
        ("lightning.pytorch.plugins.Strange", "which trainkit's Trainer cannot use"),
    ],
)
def test_lightnings_classes_have_their_names_here(target: str, words: str) -> None:
    """Whether Lightning is installed or not."""
    assert words in TARGETS[target]
    assert target.replace("lightning", "mine") not in TARGETS


def test_a_file_that_imports_lightning_where_there_is_none_says_what_to_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And does not ask to install it."""
    monkeypatch.delitem(sys.modules, "lightning", raising=False)
    text = text_of(ModuleNotFoundError("No module named 'lightning'", name="lightning.pytorch"))
    assert "There is no module lightning. Import trainkit in its place: " in text
