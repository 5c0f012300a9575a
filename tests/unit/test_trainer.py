"""Trainer: its arguments, entry points and properties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toy import Line, Net, Recorder, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.api.datamodule import DataModule
from trainkit.api.lightning_arguments import TRAINER_TAKES
from trainkit.api.lightning_names import TRAINER_ARGUMENTS
from trainkit.callbacks import DivergenceGuard, ModelCheckpoint
from trainkit.callbacks.banner import Banner
from trainkit.callbacks.progress.progress import ProgressBar
from trainkit.checkpoint.format import load_weights, verify
from trainkit.data.seeding import seed_everything
from trainkit.engine.single import SingleEngine
from trainkit.errors import CheckpointError, ConfigError, DataError, TaskError
from trainkit.loggers import CSVLogger, TensorBoardLogger
from trainkit.trainer import Trainer


class Data(DataModule):
    """Provides loaders and records calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        """Note."""
        self.calls.append("prepare_data")

    def setup(self, stage: Any) -> None:
        """Note."""
        self.calls.append(f"setup {stage}")

    def teardown(self, stage: Any) -> None:
        """Note."""
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        """Return eight rows."""
        return loader(8)

    def val_dataloader(self) -> Any:
        """Return four rows."""
        return loader(4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_epoch": 3}, r"^trainer\.max_epoch is not a setting\. Did you mean 'max_epochs'\?"),
        (
            {"max_epochs": -2},
            r"^trainer\.max_epochs is -2; it must be a whole number, 0 or more or -1 or null\.$",
        ),
        ({"max_steps": 1.5}, r"^trainer\.max_steps is 1\.5; "),
        (
            {"lr_scaling": "cubic"},
            r"lr_scaling is 'cubic'; it must be one of 'linear', 'sqrt', 'none'\.",
        ),
        (
            {"precision": "fp8"},
            r"precision is 'fp8'; it must be one of '32-true', .* or 32, 16, 'bf16' or 64 or null",
        ),
        (
            {"gradient_clip_val": -0.5},
            r"gradient_clip_val is -0\.5; it must be a number, 0 or more",
        ),
        (
            {"limit_val_batches": 1.5},
            r"limit_val_batches is 1\.5; it must be a whole number \(a count\), or a fraction",
        ),
        ({"max_tim": 3}, r"^trainer\.max_tim is not a setting\."),
        (
            {"strategy": "dp"},
            (
                r"^trainer\.strategy is 'dp', and gradients are summed over all processes of the"
                r" launcher"
            ),
        ),
        ({"resume_from_checkpoint": "x"}, r"^trainer\.resume_from_checkpoint: .*ckpt_path="),
        ({"resume_from_checkpoin": "x"}, r"Did you mean 'resume_from_checkpoint'\?"),
        ({"min_epoch": 1}, r"Did you mean 'min_epochs'\?"),
        ({"min_epochs": 3, "max_epochs": 2}, r"min_epochs is 3, but trainer\.max_epochs is 2"),
        (
            {"strategy": "ddp_notebook"},
            r"notebook.*%%writefile train\.py.*horovodrun -np 2 python train\.py",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    """Unknown names, wrong types, values out of range and Lightning's own are refused by name."""
    with pytest.raises(ConfigError, match=words):
        Trainer(**({"max_epochs": 1} | arguments))


@pytest.mark.parametrize("name", sorted(TRAINER_ARGUMENTS.keys() - TRAINER_TAKES.keys()))
def test_what_lightning_calls_otherwise_is_explained(name: str) -> None:
    """The error for each of Lightning's arguments that trainkit lacks names the replacement."""
    with pytest.raises(ConfigError, match=rf"^trainer\.{name}: \S.*\.$"):
        Trainer(max_epochs=1, **{name: True})


def test_training_needs_an_end(tmp_path: Path) -> None:
    """None of max_epochs, max_steps and max_time is no limit at all, which is refused;
    evaluation needs none.
    """
    trainer = Trainer(run_dir=str(tmp_path), logger=False)
    with pytest.raises(
        ConfigError,
        match=r"None of trainer\.max_epochs, trainer\.max_steps and trainer\.max_time is set",
    ):
        trainer.fit(Line(), loader(8))
    assert trainer.validate(Line(), loader(8))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr_warmup_steps": 1, "lr_warmup_epochs": 1}, "set only one of the two"),
        (
            {"global_batch_size": 10},
            r"no multiple of data\.batch_size x ranks = 4 x 1 = 4\. Nearest: 8 or 12",
        ),
        ({"global_batch_size": 8, "accumulate_grad_batches": 3}, r"needs 2 at 1 rank"),
        ({"limit_train_batches": 0}, r"limit_train_batches is 0; it must be above 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    """Settings that do not fit each other or the data are refused before the first step."""
    with pytest.raises(ConfigError, match=words):
        quiet(tmp_path, **settings).fit(Line(), loader(8))


def test_a_global_batch_size_sets_the_accumulation(tmp_path: Path) -> None:
    """The accumulation is derived from the global batch, and the rate from the reference."""
    recorder = Recorder()
    trainer = quiet(tmp_path, global_batch_size=12, lr_reference_batch_size=6, callbacks=recorder)
    trainer.fit(Line(), loader(23))
    assert (trainer.batch_plan.accumulate, trainer.global_step) == (3, 2)
    assert recorder.lrs == pytest.approx([0.2, 0.2])


def test_warmup_is_counted_in_epochs(tmp_path: Path) -> None:
    """Warm-up over two epochs of three steps rises over six steps."""
    recorder = Recorder()
    quiet(tmp_path, max_epochs=3, lr_warmup_epochs=2.0, callbacks=recorder).fit(Line(), loader(12))
    assert recorder.lrs == pytest.approx([0.1 * min(1, s / 6) for s in range(1, 10)])


def test_the_length_of_a_run_is_known_to_the_task(tmp_path: Path) -> None:
    """estimated_stepping_batches is there in configure_optimizers:
    steps of all epochs, or the limit.
    """
    lengths: list[int] = []

    class Look(Line):
        def configure_optimizers(self) -> Any:
            lengths.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    quiet(tmp_path, max_epochs=3, accumulate_grad_batches=2).fit(Look(), loader(23))
    quiet(tmp_path, max_steps=4).fit(Look(), loader(23))
    assert lengths == [9, 4]
    with pytest.raises(
        ConfigError, match=r"steps of the run is not known: .* Set trainer\.max_steps"
    ):
        quiet(tmp_path).fit(Look(), iter([[torch.zeros(2, 3), torch.zeros(2, 1)]]))


@pytest.mark.parametrize("quick", [True, 2])
def test_a_fast_dev_run_tries_all_and_writes_nothing(tmp_path: Path, quick: Any) -> None:
    """fast_dev_run trains and validates this many batches, and writes neither logs nor checkpoints,
    even if requested.
    """
    validated: list[int] = []

    class Count(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            validated.append(batch_idx)

    settings: dict[str, Any] = {"max_epochs": 9, "val_check_interval": 100, "lr_warmup_epochs": 5.0}
    callbacks = [ModelCheckpoint(monitor="val/x"), CSVLogger()]
    trainer = Trainer(
        fast_dev_run=quick,
        run_dir=str(tmp_path),
        callbacks=callbacks,
        enable_progress_bar=False,
        **settings,
    )
    trainer.fit(Count(), loader(23), loader(23))
    assert trainer.global_step == len(validated) == int(quick)
    assert list(tmp_path.iterdir()) == [tmp_path / ".lock"]


def test_the_standard_callbacks_are_there(tmp_path: Path) -> None:
    """A plain Trainer compares its ranks, shows, logs and saves;
    checkpoints come last, since they save the others' changes.
    """

    class Own(Callback):
        """Nothing."""

    callbacks = Trainer(max_epochs=1, callbacks=[ModelCheckpoint(monitor="a"), Own()]).callbacks
    shown = [
        Banner,
        Own,
        DivergenceGuard,
        ProgressBar,
        CSVLogger,
        TensorBoardLogger,
        ModelCheckpoint,
    ]
    assert [type(c) for c in callbacks] == shown
    assert [type(c) for c in quiet(tmp_path).callbacks] == [Banner, DivergenceGuard]


def test_one_logger_or_callback_needs_no_list() -> None:
    """A single callback and a single logger are taken as they are."""
    own = CSVLogger()
    callbacks = Trainer(
        max_epochs=1, logger=own, enable_checkpointing=False, enable_progress_bar=False
    ).callbacks
    assert callbacks[-1] is own


def test_a_data_module_is_prepared_set_up_and_torn_down(tmp_path: Path) -> None:
    """A DataModule's methods are called around the run."""
    data = Data()
    trainer = quiet(tmp_path)
    trainer.fit(Line(), datamodule=data)
    trainer.validate(Line(), datamodule=data)
    assert data.calls == [
        *("prepare_data", "setup fit", "teardown fit"),
        *("prepare_data", "setup validate", "teardown validate"),
    ]
    assert trainer.callback_metrics.keys() == {"val/loss"}


def test_data_from_two_sides_is_refused(tmp_path: Path) -> None:
    """Loaders and a DataModule at once are refused,
    also if the DataModule stands in the place of a loader.
    """
    with pytest.raises(ConfigError, match="Both train_dataloaders and datamodule were given"):
        quiet(tmp_path).fit(Line(), loader(8), datamodule=Data())
    with pytest.raises(ConfigError, match="Both val_dataloaders and datamodule were given"):
        quiet(tmp_path).fit(Line(), None, loader(8), datamodule=Data())
    with pytest.raises(
        ConfigError, match=r"train_dataloaders is a DataModule, and loaders were given beside it"
    ):
        quiet(tmp_path).fit(Line(), Data(), loader(8))


def test_a_datamodule_may_stand_in_the_place_of_loaders(tmp_path: Path) -> None:
    """As Lightning takes it, in each entry point."""
    trainer = quiet(tmp_path, max_epochs=1)
    trainer.fit(Line(), Data())
    assert trainer.global_step > 0
    assert trainer.validate(Line(), Data()) is not None


def test_a_run_that_has_ended_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Resumed with the same limit, it trains nothing, and the message says what to raise."""
    settings = {"max_epochs": 1, "callbacks": [ModelCheckpoint()], "enable_checkpointing": True}
    quiet(tmp_path, **settings).fit(Line(), loader(8))
    assert "Nothing is left to train" not in capsys.readouterr().out
    quiet(tmp_path, **settings).fit(Line(), loader(8), ckpt_path="last")
    assert (
        capsys.readouterr().out.count(
            "Nothing is left to train: the run has reached max_epochs or max_steps."
        )
        == 1
    )


def test_a_run_without_time_left_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resumed with the same max_time, it trains nothing; there may be no bar that prints why."""
    settings = {"max_epochs": 10**6, "max_time": 0.02, "enable_checkpointing": True}
    quiet(tmp_path, **settings).fit(Line(), loader(8))
    capsys.readouterr()
    quiet(tmp_path, **settings).fit(Line(), loader(8), ckpt_path="last")
    assert "Nothing is left to train: the time limit is reached" in capsys.readouterr().out


def test_no_training_data_raises(tmp_path: Path) -> None:
    """Without training data fit raises and names the places for it."""
    with pytest.raises(
        ConfigError, match=r"There is no training data: pass train_dataloaders or a datamodule"
    ):
        quiet(tmp_path).fit(Line())


def test_more_ranks_than_samples_are_refused(tmp_path: Path) -> None:
    """Each rank needs a sample at least."""
    engine = SingleEngine("cpu")

    class Four(SingleEngine):
        def _start(self) -> None:
            super()._start()
            self.ranks.world_size = 4

    with pytest.raises(DataError, match=r"The training data has 3 samples for 4 ranks"):
        quiet(tmp_path, engine=Four("cpu")).fit(Line(), loader(3))
    quiet(tmp_path, engine=engine).fit(Line(), loader(3))


def test_best_and_last_are_found_after_a_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "best" and "last" after a fit are those of that fit, also without a run_dir."""
    monkeypatch.chdir(tmp_path)
    silent: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(max_epochs=2, callbacks=ModelCheckpoint(monitor="val/loss"), **silent)
    trainer.fit(Line(), loader(23), loader(4))
    fitted = trainer.run_dir
    monkeypatch.setattr("trainkit.run.folder.time.strftime", lambda form: "a second later")
    for ckpt_path in ("best", "last"):
        assert trainer.test(Line(), loader(4), ckpt_path=ckpt_path).keys() == {"val/loss"}
        assert trainer.run_dir == fitted


def test_two_runs_of_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that start at the same time do not write into each other's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainkit.run.folder.time.strftime", lambda form: "now")
    folders = set()
    for _ in range(3):
        trainer = Trainer(
            max_steps=1, logger=False, enable_progress_bar=False, enable_model_summary=False
        )
        trainer.fit(Line(), loader(4))
        folders.add(trainer.run_dir)
    assert len(folders) == 3
    assert {folder.parent for folder in folders} == {tmp_path / "runs" / "Line"}


def test_a_folder_that_cannot_be_written_raises(tmp_path: Path) -> None:
    """A run_dir that cannot be made is refused before anything is trained."""
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"run_dir is '.*file/run', which cannot be written: Not a directory"
    ):
        quiet(tmp_path / "file" / "run").fit(Line(), loader(8))


def test_a_checkpoint_can_be_saved_by_hand(tmp_path: Path) -> None:
    """save_checkpoint writes the weights of the last fit, also after an evaluation."""
    task, other, trainer = Net(), Net(), quiet(tmp_path / "run")
    trainer.fit(task, loader(23))
    trainer.validate(task, loader(4))
    trainer.save_checkpoint(tmp_path / "mine", weights_only=True)
    verify(tmp_path / "mine")
    load_weights(tmp_path / "mine", other)
    assert torch.equal(weights(other), weights(task))


def test_a_checkpoint_that_was_asked_for_and_is_not_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script would continue without it; a callback's own checkpoints cost no run. Nothing says
    that training continues: it has ended.
    """
    trainer = quiet(tmp_path / "run")
    trainer.fit(Line(), loader(8))
    (tmp_path / "model.ckpt").touch()
    with pytest.raises(CheckpointError, match=r"could not write .*model\.ckpt: .*Make room there"):
        trainer.save_checkpoint(tmp_path / "model.ckpt")
    said = capsys.readouterr().out
    assert "was NOT written" in said and "Training continues" not in said


def test_a_checkpoint_needs_a_fit(tmp_path: Path) -> None:
    """Without a fit, saving a checkpoint raises."""
    trainer = quiet(tmp_path)
    with pytest.raises(ConfigError, match="The Trainer has not run yet"):
        _ = trainer.global_step
    trainer.validate(Line(), loader(4))
    with pytest.raises(ConfigError, match="No fit has run yet"):
        trainer.save_checkpoint(tmp_path / "mine")
    with pytest.raises(ConfigError, match="No fit has run yet"):
        _ = trainer.batch_plan


def test_a_trainer_can_fit_again(tmp_path: Path) -> None:
    """A second fit begins from the start, with the weights as they are."""
    task, trainer = Line(), quiet(tmp_path)
    trainer.fit(task, loader(23))
    first = weights(task)
    trainer.fit(task, loader(23))
    assert (trainer.global_step, trainer.current_epoch) == (6, 1)
    assert not torch.equal(weights(task), first)


def test_the_same_seed_is_the_same_run(tmp_path: Path) -> None:
    """Order, dropout and weights follow from the seed; another seed is another run."""
    ends = []
    for seed in (3, 3, 4):
        task = Net()
        torch.rand(5)
        quiet(tmp_path, seed=seed).fit(task, loader(23, shuffle=True))
        ends.append(weights(task))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_seeding_everything_seeds_all_three() -> None:
    """seed_everything makes torch, numpy and random repeat themselves."""
    import random

    import numpy as np

    drawn = []
    for _ in range(2):
        assert seed_everything(-3) == -3
        drawn.append((float(torch.rand(())), float(np.random.rand()), random.random()))
    assert drawn[0] == drawn[1]


def test_optimizers_may_be_in_any_form(tmp_path: Path) -> None:
    """A task that returns something else than optimizers raises; the error lists the forms."""

    class Wrong(Line):
        def configure_optimizers(self) -> Any:
            return 0.1

    with pytest.raises(TaskError, match="configure_optimizers returned float"):
        quiet(tmp_path).fit(Wrong(), loader(8))


def test_determinism_is_asked_of_torch_and_given_back(tmp_path: Path) -> None:
    """deterministic=True holds during the run; afterwards torch is as the user left it."""
    seen: list[bool] = []

    class Look(Line):
        def on_train_start(self) -> None:
            seen.append(torch.are_deterministic_algorithms_enabled())

    quiet(tmp_path, deterministic=True).fit(Look(), loader(8))
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        quiet(tmp_path).fit(Look(), loader(8))
        assert seen == [True, True]
    finally:
        torch.use_deterministic_algorithms(False)


def test_fit_returns_the_history(tmp_path: Path) -> None:
    """A row for each epoch: its number, its last step, the rate, and the logged epoch values,
    as in callback_metrics.
    """
    trainer = quiet(tmp_path, max_epochs=2)
    history = trainer.fit(Line(lr=0.1), loader(8), loader(5))
    assert [(row["epoch"], row["step"], row["lr"]) for row in history] == [(0, 2, 0.1), (1, 4, 0.1)]
    assert history[1]["val/loss"] == trainer.callback_metrics["val/loss"] != history[0]["val/loss"]


def test_the_history_resumes(tmp_path: Path) -> None:
    """A resumed run returns the epochs before it too, each once;
    an epoch that a limit cut has a row.
    """
    quiet(tmp_path, max_steps=3, enable_checkpointing=True).fit(Line(), loader(8), loader(5))
    resumed = quiet(tmp_path, max_epochs=3, enable_checkpointing=True).fit(
        Line(), loader(8), loader(5), ckpt_path="last"
    )
    whole = quiet(tmp_path / "whole", max_epochs=3).fit(Line(), loader(8), loader(5))
    assert resumed == whole
    assert len(quiet(tmp_path / "cut", max_steps=3).fit(Line(), loader(8), loader(5))) == 2
