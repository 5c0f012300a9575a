"""What a Lightning user types: arguments, hooks and attributes that mean the same here,
or are answered with what to do.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader

import trainkit
from tests.helpers.threads import World
from tests.helpers.toy import Line, loader, quiet, rows
from trainkit.api import lightning_arguments
from trainkit.api.callback import Callback
from trainkit.api.view import RunView
from trainkit.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from trainkit.errors import ConfigError, TaskError
from trainkit.launch.environment import Launcher
from trainkit.loggers import CSVLogger, JSONLLogger, TensorBoardLogger, WandbLogger


@pytest.mark.parametrize(
    "arguments",
    [
        {"accelerator": "auto", "devices": "auto", "strategy": "auto", "num_nodes": 1},
        {"accelerator": "cpu", "devices": 1, "strategy": "ddp", "use_distributed_sampler": True},
        {
            "devices": -1,
            "strategy": "ddp_find_unused_parameters_true",
            "inference_mode": False,
            "barebones": False,
        },
        {
            "plugins": [],
            "enable_autolog_hparams": True,
            "model_registry": None,
            "default_root_dir": None,
        },
    ],
)
def test_a_lightning_users_trainer_is_taken(arguments: dict[str, Any], tmp_path: Path) -> None:
    """On one process these ask for what happens anyway."""
    quiet(tmp_path, **arguments).fit(Line(), loader(8))


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (
            {"devices": 2},
            (
                r"trainer\.devices is 2, but 1 process of this script runs on this host\."
                r" .*horovodrun -np 2 python"
            ),
        ),
        ({"devices": [0, 1]}, r"trainer\.devices is \[0, 1\].*CUDA_VISIBLE_DEVICES"),
        ({"devices": "two"}, r"trainer\.devices is 'two'; it must be \"auto\""),
        (
            {"num_nodes": 2},
            r"trainer\.num_nodes is 2, but the launcher started processes on 1 host\.",
        ),
        ({"accelerator": "gpu"}, r'trainer\.accelerator is "gpu", but torch sees no GPU here'),
        (
            {"accelerator": "tpu"},
            r'trainer\.accelerator is \'tpu\'; trainkit runs on "cpu" and "gpu"',
        ),
        ({"strategy": "deepspeed"}, r"trainer\.strategy is 'deepspeed', and gradients are summed"),
        ({"use_distributed_sampler": False}, r"pass trainkit\.sharded\(loader\)"),
        ({"barebones": True}, r"trainer\.barebones is true, .*enable_model_summary=False"),
        ({"plugins": ["x"]}, r"trainer\.plugins is"),
    ],
)
def test_what_would_be_wrong_is_refused(
    argument: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the value and what to do."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=words):
        quiet(tmp_path, **argument)


def test_the_strategy_fsdp_is_the_engine_of_that_name(tmp_path: Path) -> None:
    """Lightning's strategy="fsdp" splits the weights too."""
    assert quiet(tmp_path, strategy="fsdp").options.engine == "fsdp"


def test_devices_are_those_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a launcher with 4 processes on each of 2 hosts."""
    launcher = Launcher("horovodrun", 0, 8, 0, 4)
    monkeypatch.setattr(lightning_arguments, "read_launcher", lambda: launcher)
    quiet(tmp_path, devices=4, num_nodes=2)
    with pytest.raises(
        ConfigError, match=r"trainer\.devices is 8, but 4 processes of this script run on this host"
    ):
        quiet(tmp_path, devices=8)


def test_the_cpu_of_a_machine_with_a_gpu_is_requested_from_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """accelerator="cpu" is engine.device=cpu."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    trainer = trainkit.Trainer(max_epochs=1, accelerator="cpu")  # type: ignore[call-arg]
    assert trainer.options.engine.device == torch.device("cpu")  # type: ignore[union-attr]


def test_default_root_dir_holds_a_folder_for_each_run(tmp_path: Path) -> None:
    """As Lightning's, it is the folder of runs."""
    trainer = trainkit.Trainer(max_epochs=1, default_root_dir=tmp_path, enable_progress_bar=False)  # type: ignore[call-arg]
    trainer.fit(Line(), loader(8))
    (run,) = tmp_path.iterdir()
    assert (run / "metrics.csv").is_file()


def test_a_second_run_of_a_second_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moved the first one's checkpoints aside, and wrote others under their names."""
    monkeypatch.setattr("time.strftime", lambda form: "now")
    for _ in range(3):
        trainer = trainkit.Trainer(max_epochs=1, default_root_dir=tmp_path)  # type: ignore[call-arg]
        trainer.fit(Line(), loader(8))
    assert sorted(run.name for run in tmp_path.iterdir()) == ["now", "now.2", "now.3"]


def test_two_names_of_one_setting_are_refused(tmp_path: Path) -> None:
    """One of them would have no effect."""
    both = {"default_root_dir": tmp_path / "a", "run_dir": str(tmp_path / "b")}
    with pytest.raises(ConfigError, match=r"default_root_dir and trainer\.run_dir are given"):
        trainkit.Trainer(max_epochs=1, **both)  # type: ignore[arg-type]
    assert trainkit.Trainer(max_epochs=1, **both | {"run_dir": None})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"strategy and trainer\.engine are given"):
        trainkit.Trainer(max_epochs=1, strategy="fsdp", engine="single")  # type: ignore[call-arg]


class Watching(Line):
    """Has hooks of evaluation batches with and without a loader's number,
    and callbacks of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        """Without the loader's number."""
        self.seen.append(("start", batch_idx))

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """With it."""
        self.seen.append(("end", batch_idx, dataloader_idx))

    def configure_callbacks(self) -> Any:
        """Return one of each kind: new, and in place of the Trainer's."""
        return [LearningRateMonitor(), EarlyStopping("val/loss", patience=7)]


def test_a_task_has_the_hooks_of_evaluation_batches(tmp_path: Path) -> None:
    """Also a Callback that leaves the loader's number out."""
    seen: list[int] = []

    class Short(Callback):
        def on_test_batch_end(
            self, trainer: RunView, task: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:  # type: ignore[override]
            seen.append(batch_idx)

    task = Watching()
    quiet(tmp_path, callbacks=[Short()]).validate(task, [loader(4), loader(4)])
    assert task.seen == [("start", 0), ("end", 0, 0), ("start", 0), ("end", 0, 1)]
    quiet(tmp_path, callbacks=[Short()]).test(task, loader(8))
    assert seen == [0, 1]


def test_callbacks_of_a_task_take_the_place_of_those_of_their_class(tmp_path: Path) -> None:
    """For this Task only."""
    trainer = quiet(tmp_path, callbacks=[EarlyStopping("val/loss", patience=2)])
    trainer.fit(Watching(), loader(8), loader(4))
    assert trainer.early_stopping_callback.patience == 7
    assert any(
        isinstance(callback, LearningRateMonitor)
        for callback in trainer.lightning_module.trainer.callbacks
    )
    trainer.fit(Line(), loader(8), loader(4))
    assert trainer.early_stopping_callback.patience == 2

    class Wrong(Line):
        def configure_callbacks(self) -> Any:
            return [3]

    with pytest.raises(
        ConfigError,
        match=r"configure_callbacks\(\) returned a int; it must return a trainkit\.Callback",
    ):
        trainer.fit(Wrong(), loader(8))


def test_values_may_be_kept_from_the_loggers(tmp_path: Path) -> None:
    """logger=False: in callback_metrics, not in metrics.csv;
    of a step, of an epoch, of a hook and of a loader.
    """

    class Hiding(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log(
                "hidden/train", 1.0, on_step=True, on_epoch=True, logger=False, enable_graph=False
            )
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("hidden/val", 2.0, logger=False)
            self.log(f"val/of_{dataloader_idx}", 3.0, add_dataloader_idx=False)
            self.log("val/each", 4.0)

        def on_train_epoch_end(self) -> None:
            self.log("hidden/epoch", 5.0, logger=False)

    trainer = quiet(tmp_path, logger=CSVLogger(), log_every_n_steps=1)
    trainer.fit(Hiding(), loader(8), [loader(4), loader(4)])
    text = (tmp_path / "metrics.csv").read_text()
    assert "hidden" not in text
    assert "train/loss" in text
    known = {
        "hidden/train_epoch",
        "hidden/val/dataloader_idx_1",
        "hidden/epoch",
        "val/of_0",
        "val/of_1",
        "val/each/dataloader_idx_0",
    }
    assert known <= set(trainer.callback_metrics)


def test_values_of_named_loaders_may_be_kept_from_the_loggers(tmp_path: Path) -> None:
    """logger=False of a dict of loaders, and of a vector."""

    class Hiding(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("vector", torch.ones(2), logger=False)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val", 2.0, logger=False)
            self.log("val/shown", 3.0)

    trainer = quiet(tmp_path, logger=CSVLogger(), log_every_n_steps=1)
    trainer.fit(Hiding(), loader(8), {"near": loader(4), "far": loader(4)})
    names = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"val/shown/near", "val/shown/far"} <= {*names}
    assert not {"val/near", "val/far", "vector/0"} & {*names}
    assert "val/far" in trainer.callback_metrics


def test_metric_objects_may_be_kept_from_the_loggers(tmp_path: Path) -> None:
    """One of several numbers, one in a dict, and a collection in a hook."""

    class Hiding(Line):
        def __init__(self) -> None:
            super().__init__()
            self.each = torchmetrics.Accuracy("multiclass", num_classes=2, average="none")
            self.mean = torchmetrics.MeanMetric()
            self.both = torchmetrics.MetricCollection({"a": torchmetrics.MeanMetric()})

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.each(torch.tensor([0, 1]), torch.tensor([0, 0]))
            self.mean(1.0)
            self.both.update(2.0)
            self.log("each", self.each, on_step=True, on_epoch=True, logger=False)
            self.log("group", {"mean": self.mean}, on_step=False, logger=False)
            self.log("eachone", 3.0, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.log("both", self.both, logger=False)

    trainer = quiet(tmp_path, logger=CSVLogger(), log_every_n_steps=1, max_epochs=1)
    trainer.fit(Hiding(), loader(8))
    names = {*(tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")}
    assert {name for name in names if name.startswith(("each", "group", "both"))} == {
        "eachone_step",
        "eachone_epoch",
    }
    assert {"each_epoch/0", "group/mean", "both/a"} <= set(trainer.callback_metrics)


@pytest.mark.parametrize("hides", ["train", "validate"])
def test_a_name_is_kept_from_the_loggers_where_it_was_asked_for(hides: str, tmp_path: Path) -> None:
    """log("both", logger=False) in training hides no "both" of validation, and the reverse."""

    class Hiding(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("both", 1.0, logger=hides != "train")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("both", 2.0, logger=hides != "validate")

    quiet(tmp_path, logger=CSVLogger(), log_every_n_steps=1).fit(Hiding(), loader(8), loader(4))
    table = csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines())
    assert {row["both"] for row in table} - {""} == {"2.0" if hides == "train" else "1.0"}


def test_values_of_all_ranks_are_gathered(tmp_path: Path) -> None:
    """all_gather adds a dimension for the ranks, in structures too."""

    def work(engine: Any) -> Any:
        task = Line()
        gathered: list[Any] = []

        class Gather(Callback):
            def on_fit_start(self, trainer: RunView, task: Any) -> None:
                gathered.append(
                    task.all_gather(
                        {
                            "a": torch.tensor([1.0, trainer.engine.ranks.rank]),
                            "b": [trainer.engine.ranks.rank],
                        }
                    )
                )
                with pytest.raises(TaskError, match="gathered values carry no gradients"):
                    task.all_gather(torch.ones(1), sync_grads=True)

        quiet(tmp_path, engine=engine, fast_dev_run=True, callbacks=[Gather()]).fit(task, loader(8))
        return gathered[0]

    for found in World(2).run(work):
        assert found["a"].tolist() == [[1.0, 0.0], [1.0, 1.0]]
        assert found["b"][0].tolist() == [0, 1]


def test_the_attributes_of_a_run_that_lightning_users_read(tmp_path: Path) -> None:
    """Inside of hooks, and of the Trainer after a fit."""
    seen: list[Any] = []

    class Reading(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            trainer = self.trainer
            seen.append(
                (
                    trainer.num_training_batches,
                    trainer.is_last_batch,
                    trainer.training,
                    self.local_rank,
                    self.global_rank,
                )
            )
            return super().training_step(batch, batch_idx)

    trainer = quiet(tmp_path)
    task = Reading()
    trainer.fit(task, loader(8))
    assert seen == [(2, False, True, 0, 0), (2, True, True, 0, 0)]
    assert (trainer.lightning_module, trainer.log_dir, trainer.num_nodes, trainer.num_devices) == (
        task,
        str(tmp_path),
        1,
        1,
    )
    assert (trainer.validating, trainer.testing, trainer.predicting) == (False, False, False)
    assert task.dtype == torch.float32
    task.freeze()
    assert not any(p.requires_grad for p in task.parameters())
    task.unfreeze()
    assert all(p.requires_grad for p in task.parameters())


def test_a_datamodule_of_data_sets(tmp_path: Path) -> None:
    """Training data is shuffled; what is not given is not there."""
    data = trainkit.DataModule.from_datasets(rows(8), val_dataset=rows(4), batch_size=4)
    train = data.train_dataloader()
    assert isinstance(train, DataLoader)
    assert type(train.sampler).__name__ == "RandomSampler"
    assert data.test_dataloader() is None
    trainer = quiet(tmp_path)
    trainer.fit(Line(), datamodule=data)
    assert trainer.global_step == 2


def test_names_of_checkpoints_may_hold_the_names_of_values(tmp_path: Path) -> None:
    """auto_insert_metric_name, and arguments that change nothing here."""
    checkpoint = ModelCheckpoint(
        filename="{epoch}-{val_loss:.2f}",
        auto_insert_metric_name=True,
        verbose=True,
        save_on_train_epoch_end=False,  # type: ignore[call-arg]
    )
    trainer = quiet(tmp_path, callbacks=[checkpoint])
    trainer.fit(Line(), loader(8), loader(4))
    assert Path(checkpoint.last_model_path).name.startswith("epoch=0-val_loss=")


def test_loggers_may_have_a_folder_of_their_own(tmp_path: Path) -> None:
    """save_dir, name and version, as Lightning's loggers."""
    place = tmp_path / "logs"
    loggers = [
        TensorBoardLogger(str(place), name="tb"),
        CSVLogger(str(place), name="csv", version=3, flush_logs_every_n_steps=10),  # type: ignore[call-arg]
        JSONLLogger(str(place), "json", "mine"),
    ]
    quiet(tmp_path / "run", logger=loggers, log_every_n_steps=1).fit(Line(), loader(8))
    assert list((place / "tb" / "run").glob("events*"))
    assert (place / "csv" / "version_3" / "metrics.csv").is_file()
    assert (place / "json" / "mine" / "metrics.jsonl").is_file()
    assert WandbLogger(offline=True).mode == "offline"  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"folders below its save_dir"):
        CSVLogger(name="x")
    with pytest.raises(
        ConfigError,
        match=r"WandbLogger\.dir is 'x', and there is no such setting: give it as save_dir",
    ):
        WandbLogger(dir="x")  # type: ignore[call-arg]
    with pytest.raises(
        ConfigError, match=r"CSVLogger\.save_dri is not a setting\. Did you mean 'save_dir'"
    ):
        CSVLogger(save_dri="x")  # type: ignore[call-arg]
