"""What a command changes in a run, and how the fit of a config and of a script is made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.toy import Line, loader
from trainkit.callbacks import ModelCheckpoint
from trainkit.config.compose import ComposedJob
from trainkit.engine.ddp.engine import DDPEngine
from trainkit.errors import ConfigError
from trainkit.extensions.script.changes import Changes
from trainkit.extensions.script.command_line import Script
from trainkit.extensions.script.subject import ConfigSubject, ScriptSubject
from trainkit.loggers import CSVLogger
from trainkit.run.around_fit import RequestedFit
from trainkit.run.build import StartFrom
from trainkit.run.data_sources import DataSources
from trainkit.trainer import Trainer

RECORDER = "trainkit.extensions.check_resume.recorder.ResumeRecorder"
CHANGES = Changes(
    "runs/there",
    {"max_steps": 9, "max_epochs": None},
    {"check_resume": {"_target_": RECORDER, "record_to": "notes", "end_at": 9}},
    ckpt_path="last",
    checkpoints_to="runs/there/kept-by",
)


def script_subject(data: Any = None, **settings: Any) -> ScriptSubject:
    """Return the fit of a script."""
    trainer = Trainer(max_epochs=1, logger=False, **settings)
    sources = DataSources({"train": loader(16) if data is None else data})
    fit = RequestedFit(Line(), sources, StartFrom(), trainer.options, trainer.callbacks)
    return ScriptSubject(Script("mine.py", ("--x", "1")), fit, "runs/mine")


def test_options_of_the_engine_are_written_where_the_fit_has_them() -> None:
    """A script has no overrides."""
    options = {"num_groups": 4, "cycle_time_ms": 1}
    config = ConfigSubject(ComposedJob("fit", {"conf": "mine", "run_dir": "x"}, {}), ["conf=mine"])
    assert config.engine_text(options) == "engine.num_groups=4 engine.cycle_time_ms=1"
    script = script_subject()
    assert script.engine_text(options) == "num_groups=4 cycle_time_ms=1 of the engine in mine.py"
    assert config.engine_text({}) == script.engine_text({}) == ""


def test_changes_of_a_config_are_overrides() -> None:
    """Settings, callbacks, loggers, folder and start, after the user's own."""
    config = {
        "conf": "mine",
        "run_dir": "runs/x",
        "init_weights": "w.pt",
        "logger": {"wandb": {"_target_": "trainkit.loggers.WandbLogger"}},
        "callbacks": {"c": {"_target_": "trainkit.callbacks.ModelCheckpoint", "dirpath": "mine"}},
    }
    subject = ConfigSubject(ComposedJob("fit", config, {}), ["conf=mine", "task.x=1"])
    line = subject.line(CHANGES, Path("unused"), "whole")
    assert line[:5] == ["-m", "trainkit", "fit", "conf=mine", "task.x=1"]
    assert {
        "trainer.max_steps=9",
        "trainer.max_epochs=null",
        "trainer.enable_progress_bar=false",
        "~logger.wandb",
        "++logger.csv._target_=trainkit.loggers.CSVLogger",
        "callbacks.c.dirpath='runs/there/kept-by/c'",
        f"++callbacks.check_resume._target_='{RECORDER}'",
        "++callbacks.check_resume.end_at=9",
        "run_dir='runs/there'",
        "ckpt_path=last",
        "init_weights=null",
    } <= set(line)


def test_changes_of_a_script_are_a_file(tmp_path: Path) -> None:
    """Its process reads them back as they were."""
    line = script_subject().line(CHANGES, tmp_path, "whole")
    assert line[:2] == ["-m", "trainkit.extensions.script.child"]
    assert line[2:] == [str(tmp_path / "whole.json"), "mine.py", "--x", "1"]
    assert Changes.read(tmp_path / "whole.json") == CHANGES
    assert json.loads((tmp_path / "whole.json").read_text())["ckpt_path"] == "last"


def test_a_scripts_trainer_takes_the_changes() -> None:
    """Callbacks of the same class are replaced, a folder of the user's own is left alone."""
    own = ModelCheckpoint(dirpath="mine")
    given = CHANGES.given_to_trainer({"callbacks": [own], "max_steps": 3, "seed": 5})
    assert (given["max_steps"], given["run_dir"], given["seed"]) == (9, "runs/there", 5)
    recorder, moved = given["callbacks"]
    assert type(recorder).__name__ == "ResumeRecorder"
    assert (own.dirpath, moved.dirpath) == ("mine", "runs/there/kept-by/0")
    assert [type(logger) for logger in given["logger"]] == [CSVLogger]
    replaced = CHANGES.given_to_trainer({"callbacks": recorder})
    assert len(replaced["callbacks"]) == 1
    assert CHANGES.started(StartFrom(init_weights="w.pt")) == StartFrom("last")


def test_a_script_is_made_again_with_another_batch() -> None:
    """The samples and their order stay; the user's own loader and task do, too."""
    subject = script_subject(global_batch_size=8)
    again = subject.with_batch_size(2, accumulate=2)
    found = again.data.find("train", again.task)
    assert (found.batch_size, subject.batch_size) == (2, 4)
    assert found.dataset is subject.requested.data.given["train"].dataset
    assert again.options.batch.accumulate_grad_batches == 2
    assert again.options.batch.global_batch_size is None
    assert again.task is not subject.requested.task


def test_a_script_is_made_again_with_another_engine() -> None:
    """Options that the script gave its engine stay."""
    made = DDPEngine(bucket_cap_mb=3.0, compression="bf16")
    subject = script_subject(engine=made)
    assert subject.engine == {"bucket_cap_mb": 3.0, "compression": "bf16"}
    again = subject.with_engine(bucket_cap_mb=7.0).options.engine
    assert not isinstance(again, str)
    assert (again._bucket_bytes, again._compression) == (7 * 2**20, "bf16")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([torch.ones(2)], "The training data of mine.py is a list"),
        (
            DataLoader(TensorDataset(torch.ones(4, 1)), batch_sampler=[[0, 1], [2, 3]]),
            "has a batch_sampler of its own",
        ),
    ],
)
def test_batches_that_cannot_change_are_refused(data: Any, message: str) -> None:
    """With what to pass to fit."""
    with pytest.raises(ConfigError, match=message):
        _ = script_subject(data).batch_size
