"""Behaviours of a run: how long it is, when it validates, what its data are."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.same_names.kit import Framework, data, line_of, weights
from tests.same_names.table import differs, equal, refused


def validations_of(kit: Framework, rows: int = 40, **settings: Any) -> Any:
    """Return the steps of the validations."""
    seen: list[int] = []
    task = kit.line(on_validation_end=lambda self: seen.append(self.global_step))
    trainer = kit.trainer(**settings)
    trainer.fit(task, data(rows), data())
    return seen, trainer.global_step


@equal
def each_epoch(kit: Framework) -> Any:
    """Validation after each epoch."""
    return validations_of(kit)


@equal
def every_n_epochs(kit: Framework) -> Any:
    """check_val_every_n_epoch."""
    return validations_of(kit, max_epochs=5, check_val_every_n_epoch=2)


@equal
def every_n_batches(kit: Framework) -> Any:
    """val_check_interval as a number of batches."""
    return validations_of(kit, val_check_interval=2)


@equal
def a_share_of_an_epoch(kit: Framework) -> Any:
    """val_check_interval as a share of the epoch."""
    return validations_of(kit, rows=32, val_check_interval=0.5)


@equal
def across_epochs(kit: Framework) -> Any:
    """val_check_interval across epochs, with check_val_every_n_epoch=None."""
    return validations_of(kit, max_epochs=4, val_check_interval=7, check_val_every_n_epoch=None)


@differs(
    "There val_check_interval counts batches; here it counts updates, which do not depend on the"
    " number of ranks."
)
def every_n_batches_accumulated(kit: Framework) -> Any:
    """val_check_interval=2 with accumulate_grad_batches=2."""
    return validations_of(kit, rows=64, val_check_interval=2, accumulate_grad_batches=2)


@differs("A run that max_steps ends inside an epoch is validated at its end too.")
def max_steps_inside_an_epoch(kit: Framework) -> Any:
    """Validations with max_steps in the middle of an epoch."""
    return validations_of(kit, max_steps=7)


@equal
def limits_of_batches(kit: Framework) -> Any:
    """limit_train_batches and limit_val_batches."""
    return validations_of(kit, limit_train_batches=3, limit_val_batches=2)


@equal
def sanity_check_of_few(kit: Framework) -> Any:
    """limit_val_batches=1 holds in the sanity check too."""
    batches: list[int] = []
    step = lambda self, batch, batch_idx: batches.append(batch_idx)  # noqa: E731
    settings = {"max_epochs": 1, "num_sanity_val_steps": 2, "limit_val_batches": 1}
    kit.trainer(**settings).fit(kit.line(validation_step=step), data(), data())
    return batches


@differs(
    "There a share counts batches, rounded down; here samples, so that it is the same data on any"
    " number of ranks."
)
def share_of_batches(kit: Framework) -> Any:
    """limit_train_batches=0.5 of 5 batches."""
    return validations_of(kit, limit_train_batches=0.5)


@equal
def positional_checkpoint(kit: Framework) -> Any:
    """validate(task, loader, None, False): ckpt_path and verbose by their places."""
    values = kit.trainer().validate(kit.line(), data(), None, False)[0]
    return round(float(values["val_loss"]), 4)


@equal
def no_validation(kit: Framework) -> Any:
    """limit_val_batches=0."""
    return validations_of(kit, limit_val_batches=0)


@equal
def max_epochs_zero(kit: Framework) -> Any:
    """max_epochs=0 trains nothing."""
    task = kit.line()
    before = weights(task)
    trainer = kit.trainer(max_epochs=0)
    trainer.fit(task, data())
    return trainer.global_step, weights(task) == before


@equal
def max_steps_unset(kit: Framework) -> Any:
    """trainer.max_steps where none is set."""
    return kit.trainer().max_steps, kit.trainer(max_steps=3).max_steps, kit.trainer().max_epochs


@equal
def max_epochs_unset(kit: Framework) -> Any:
    """self.trainer.max_epochs in a hook, where max_steps alone is set."""
    trainer = kit.trainer(max_epochs=None, max_steps=3)
    seen: list[Any] = []
    task = kit.line(on_train_start=lambda self: seen.append(self.trainer.max_epochs))
    trainer.fit(task, data())
    return seen, trainer.max_epochs


@equal
def max_steps_minus_one(kit: Framework) -> Any:
    """max_steps=-1 is no limit."""
    trainer = kit.trainer(max_steps=-1)
    trainer.fit(kit.line(), data())
    return trainer.global_step


@equal
def estimated_steps(kit: Framework) -> Any:
    """estimated_stepping_batches."""
    seen: list[Any] = []

    def configure_optimizers(self: Any) -> Any:
        seen.append(self.trainer.estimated_stepping_batches)
        return torch.optim.SGD(self.parameters(), lr=0.05)

    for settings in ({}, {"max_steps": 3}, {"max_epochs": 0}, {"accumulate_grad_batches": 2}):
        kit.trainer(**settings).fit(kit.line(configure_optimizers=configure_optimizers), data())
    return seen


@equal
def batches_of_an_epoch(kit: Framework) -> Any:
    """num_training_batches and is_last_batch."""
    seen: list[Any] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.append((self.trainer.num_training_batches, self.trainer.is_last_batch))
        return self.loss(batch)

    kit.trainer().fit(kit.line(training_step=training_step), data())
    return seen


@equal
def batches_of_a_short_window(kit: Framework) -> Any:
    """num_training_batches and is_last_batch with accumulate_grad_batches=2 and 5 batches."""
    seen: list[Any] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.append((self.trainer.num_training_batches, self.trainer.is_last_batch))
        return self.loss(batch)

    kit.trainer(accumulate_grad_batches=2).fit(kit.line(training_step=training_step), data())
    return seen


@equal
def settings_in_a_hook(kit: Framework) -> Any:
    """self.trainer.accumulate_grad_batches, log_every_n_steps, limit_val_batches, ... in a hook."""
    seen: list[Any] = []
    names = (
        "accumulate_grad_batches",
        "check_val_every_n_epoch",
        "gradient_clip_val",
        "limit_predict_batches",
        "limit_test_batches",
        "limit_train_batches",
        "limit_val_batches",
        "log_every_n_steps",
        "min_epochs",
        "min_steps",
        "num_sanity_val_steps",
        "overfit_batches",
        "val_check_interval",
    )

    def on_train_start(self: Any) -> None:
        seen.append([getattr(self.trainer, name) for name in names])

    task = kit.line(on_train_start=on_train_start)
    chosen = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "limit_val_batches": 1}
    for settings in ({}, {"num_sanity_val_steps": -1}, chosen):
        trainer = kit.trainer(**settings)
        trainer.fit(task, data())
        seen.append(trainer.limit_val_batches)
    return seen


@equal
def an_error_in_setup(kit: Framework) -> Any:
    """Callback.on_exception after an error in a module's setup()."""
    seen: list[str] = []

    class Sees(kit.Callback):  # type: ignore[misc, name-defined]
        def on_exception(self, trainer: Any, task: Any, exception: BaseException) -> None:
            seen.append(str(exception))

    def setup(self: Any, stage: str) -> None:
        raise ValueError("no data")

    with contextlib.suppress(ValueError):
        kit.trainer(callbacks=[Sees()]).fit(kit.line(setup=setup), data())
    return seen


@equal
def a_stop_before_an_epoch(kit: Framework) -> Any:
    """should_stop that is set in on_train_epoch_start takes no more step."""

    def on_train_epoch_start(self: Any) -> None:
        self.trainer.should_stop = self.current_epoch == 1

    task = kit.line(on_train_epoch_start=on_train_epoch_start)
    trainer = kit.trainer(max_epochs=3)
    trainer.fit(task, data(), data())
    return trainer.global_step, weights(task)


@equal
def the_last_batch_by_hooks(kit: Framework) -> Any:
    """is_last_batch in on_train_batch_start, on_before_optimizer_step and on_train_batch_end."""
    seen: list[Any] = []
    names = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")
    note = lambda self, *args: seen.append(self.trainer.is_last_batch)  # noqa: E731
    kit.trainer().fit(kit.line(**dict.fromkeys(names, note)), data())
    return seen


@equal
def stages_of_a_fit(kit: Framework) -> Any:
    """trainer.training, .validating and .sanity_checking where batches are prepared, and in hooks."""
    seen: list[Any] = []

    def prepare(self: Any, batch: Any, dataloader_idx: int) -> Any:
        stages = self.trainer.training, self.trainer.validating, self.trainer.sanity_checking
        seen.append(stages)
        return batch

    def note(self: Any) -> None:
        seen.append((self.trainer.training, self.trainer.validating))

    names = ("on_validation_start", "on_validation_end", "on_train_epoch_end")
    task = kit.line(on_after_batch_transfer=prepare, **dict.fromkeys(names, note))
    trainer = kit.trainer(num_sanity_val_steps=1, max_epochs=1)
    trainer.fit(task, data(8), data(8))
    return seen


@equal
def names_of_the_stages(kit: Framework) -> Any:
    """trainer.state.fn and trainer.state.stage in hooks, compared with texts."""
    stages = ("fit", "train", "sanity_check", "validate", "test", "predict")
    seen: list[Any] = []

    def note(self: Any, *args: Any) -> None:
        state = self.trainer.state
        seen.append([name for name in stages if name in (state.fn, state.stage)])

    names = ("on_train_start", "on_validation_start", "on_train_epoch_end", "on_test_start")
    task = kit.line(
        on_predict_start=note,
        test_step=lambda self, batch, batch_idx: None,
        predict_step=lambda self, batch, batch_idx: batch_idx,
        **dict.fromkeys(names, note),
    )
    trainer = kit.trainer(num_sanity_val_steps=1, max_epochs=1)
    trainer.fit(task, data(8), data(8))
    for entry in (trainer.validate, trainer.test, trainer.predict):
        entry(task, data(8))
    return seen


@equal
def steps_without_a_limit_in_hooks(kit: Framework) -> Any:
    """self.trainer.max_steps in a hook, where none is set."""
    seen: list[int] = []
    task = kit.line(on_train_start=lambda self: seen.append(self.trainer.max_steps))
    kit.trainer(max_epochs=1).fit(task, data())
    return seen


@equal
def min_epochs(kit: Framework) -> Any:
    """min_epochs holds back a stop."""

    def on_train_epoch_end(self: Any) -> None:
        self.trainer.should_stop = True

    trainer = kit.trainer(min_epochs=3, max_epochs=5)
    trainer.fit(kit.line(on_train_epoch_end=on_train_epoch_end), data())
    return trainer.global_step


@equal
def stop_after_an_epoch(kit: Framework) -> Any:
    """should_stop at an epoch's end."""

    def on_train_epoch_end(self: Any) -> None:
        self.trainer.should_stop = self.current_epoch == 1

    trainer = kit.trainer(max_epochs=5)
    trainer.fit(kit.line(on_train_epoch_end=on_train_epoch_end), data())
    return trainer.global_step


@equal
def stop_in_a_batch(kit: Framework) -> Any:
    """should_stop in a batch ends the run after it."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.trainer.should_stop = batch_idx == 2
        return self.loss(batch)

    task, trainer = kit.line(training_step=training_step), kit.trainer(max_epochs=5)
    trainer.fit(task, data())
    return trainer.global_step, weights(task)


@equal
def epochs_after_a_fit(kit: Framework) -> Any:
    """current_epoch and global_step after a fit."""
    trainer = kit.trainer(max_epochs=3)
    trainer.fit(kit.line(), data())
    return trainer.current_epoch, trainer.global_step


@differs(
    "There an epoch that max_steps has cut short counts as one that is over; here it does not, and"
    " resuming trains the rest of it."
)
def the_epoch_of_max_steps(kit: Framework) -> Any:
    """current_epoch after a fit that max_steps ends inside an epoch."""
    trainer = kit.trainer(max_steps=7, max_epochs=-1)
    trainer.fit(kit.line(), data())
    return trainer.current_epoch, trainer.global_step


@differs(
    "There a second fit of a Trainer at max_epochs does nothing; here each fit is a run of its own,"
    " and says so."
)
def a_second_fit(kit: Framework) -> Any:
    """A second fit of the same Trainer."""
    task, trainer = kit.line(), kit.trainer()
    trainer.fit(task, data())
    before = weights(task)
    trainer.fit(task, data())
    return weights(task) == before


class Shifted(DataLoader):  # type: ignore[type-arg]
    """A loader that changes each batch, as prefetchers and augmentation on a GPU do."""

    def __iter__(self) -> Any:
        """Yield the batches, 100 added to each input."""
        for inputs, answers in super().__iter__():
            yield inputs + 100, answers


class Wrapped(DataLoader):  # type: ignore[type-arg]
    """A loader with an iterator of its own."""

    def _get_iterator(self) -> Any:
        return iter([(inputs + 100, answers) for inputs, answers in super()._get_iterator()])


def seen_by(kit: Framework, kind: Any) -> Any:
    """Return the means of what the steps see of a kind of loader."""
    seen: list[Any] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.append(("train", round(float(batch[0].mean()), 3)))
        return self.loss((batch[0] / 100, batch[1]))

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        seen.append(("val", round(float(batch[0].mean()), 3)))

    task = kit.line(training_step=training_step, validation_step=validation_step)
    kit.trainer(max_epochs=1).fit(task, data(kind=kind), data(kind=kind))
    return seen


@equal
def a_loader_with_its_own_iter(kit: Framework) -> Any:
    """A DataLoader subclass with its own __iter__."""
    return seen_by(kit, Shifted)


@equal
def a_loader_with_its_own_iterator(kit: Framework) -> Any:
    """A DataLoader subclass with its own _get_iterator."""
    return seen_by(kit, Wrapped)


def validated(kit: Framework, loaders: Any) -> dict[str, float]:
    """Return the values of validation, after a fit with these loaders."""
    trainer = kit.trainer()

    def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    trainer.fit(kit.line(validation_step=validation_step), data(), loaders)
    return {
        name: round(float(value), 4)
        for name, value in trainer.callback_metrics.items()
        if "val" in name
    }


@equal
def several_validation_loaders(kit: Framework) -> Any:
    """Several validation loaders, and the names of what they log."""
    return validated(kit, [data(), data(16)])


@equal
def a_dict_of_one_validation_loader(kit: Framework) -> Any:
    """A dict of one validation loader logs without a suffix."""
    return validated(kit, {"mine": data()})


@differs("There val_loss/dataloader_idx_0 and so on; here val_loss/KEY, by the dict's keys.")
def a_dict_of_validation_loaders(kit: Framework) -> Any:
    """A dict of several validation loaders, and the names of what they log."""
    return validated(kit, {"near": data(), "far": data(16)})


@equal
def a_module_with_loaders(kit: Framework) -> Any:
    """A module's own train_dataloader and val_dataloader."""
    task = kit.line(train_dataloader=lambda self: data(), val_dataloader=lambda self: data())
    trainer = kit.trainer()
    trainer.fit(task)
    return weights(task), trainer.global_step


@equal
def a_datamodule(kit: Framework) -> Any:
    """The hooks of a DataModule."""
    calls: list[Any] = []

    class Data(kit.DataModule):  # type: ignore[name-defined, misc]
        def prepare_data(self) -> None:
            calls.append("prepare_data")

        def setup(self, stage: str) -> None:
            calls.append(("setup", stage))

        def train_dataloader(self) -> Any:
            return data()

        def val_dataloader(self) -> Any:
            return data()

        def test_dataloader(self) -> Any:
            return data()

        def teardown(self, stage: str) -> None:
            calls.append(("teardown", stage))

    trainer, source = kit.trainer(), Data()
    task = kit.line(
        test_step=lambda self, batch, batch_idx: self.log("test_loss", self.loss(batch))
    )
    trainer.fit(task, datamodule=source)
    found = trainer.test(task, datamodule=source)
    return calls, [round(float(row["test_loss"]), 4) for row in [found[0]]]


@equal
def no_validation_step(kit: Framework) -> Any:
    """Validation data without a validation_step are left alone."""
    task = kit.line(validation_step=None)
    kit.trainer().fit(task, data(), data())
    return weights(task)


@equal
def validation_step_none(kit: Framework) -> Any:
    """`task.validation_step = None` and `task.val_dataloader = None` switch validation off."""
    task = kit.line(val_dataloader=lambda self: data())
    task.validation_step = task.val_dataloader = None
    kit.trainer().fit(task, data())
    return weights(task)


@differs(
    "There each epoch trains all full batches; here drop_last leaves out the last step that is not"
    " full, and says so."
)
def drop_last_accumulated(kit: Framework) -> Any:
    """drop_last=True with accumulate_grad_batches."""
    seen: list[int] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.append(batch_idx)
        return self.loss(batch)

    kit.trainer(accumulate_grad_batches=4, max_epochs=1).fit(
        kit.line(training_step=training_step), data(60, drop_last=True)
    )
    return seen


@equal
def overfit_batches(kit: Framework) -> Any:
    """overfit_batches trains on the same batches."""
    task = kit.line()
    trainer = kit.trainer(overfit_batches=2)
    trainer.fit(task, data(shuffle=False), data())
    return weights(task), trainer.global_step


@equal
def fast_dev_run(kit: Framework) -> Any:
    """fast_dev_run takes one batch of each."""
    task = kit.line()
    trainer = kit.trainer(fast_dev_run=True)
    trainer.fit(task, data(), data())
    return trainer.global_step, weights(task)


@equal
def batch_transfer_hooks(kit: Framework) -> Any:
    """on_after_batch_transfer changes the batch."""

    def on_after_batch_transfer(self: Any, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    task = kit.line(on_after_batch_transfer=on_after_batch_transfer)
    kit.trainer().fit(task, data(), data())
    return weights(task)


@equal
def one_rank_gathers(kit: Framework) -> Any:
    """all_gather at one rank adds no dimension."""
    seen: list[Any] = []

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        seen.append(list(self.all_gather(batch[0]).shape))

    kit.trainer(max_epochs=1).fit(kit.line(validation_step=validation_step), data(), data())
    return seen


@equal
def a_home_folder(kit: Framework) -> Any:
    """`~` in a path is the home folder."""
    old = os.environ.get("HOME", "")
    os.environ["HOME"] = str(kit.folder / "home")
    try:
        keeper = kit.callbacks.ModelCheckpoint(dirpath="~/saved")
        kit.trainer(callbacks=[keeper], enable_checkpointing=True, max_epochs=1).fit(
            kit.line(), data(), data()
        )
    finally:
        os.environ["HOME"] = old
    return (kit.folder / "home" / "saved").is_dir(), os.path.exists("~")


@equal
def evaluation_without_a_model(kit: Framework) -> Any:
    """validate(), test() and predict() without the model, after a fit."""
    members = {
        "val_dataloader": lambda self: data(),
        "test_dataloader": lambda self: data(),
        "predict_dataloader": lambda self: data(16),
        "test_step": lambda self, batch, batch_idx: self.log("test_loss", self.loss(batch)),
        "predict_step": lambda self, batch, batch_idx: self(batch[0]),
    }
    keeper = kit.callbacks.ModelCheckpoint(dirpath=str(kit.folder / "kept"))
    task, trainer = kit.line(**members), kit.trainer(callbacks=[keeper], enable_checkpointing=True)
    trainer.fit(task, data())
    rows = trainer.validate()[0], trainer.test()[0]
    values = [round(float(value), 4) for row in rows for value in row.values()]
    return values, torch.cat(list(trainer.predict())).reshape(-1).mul(1e3).round().tolist()


@equal
def seed_everything(kit: Framework) -> Any:
    """seed_everything(42, workers=True), and its result."""
    return (
        kit.root.seed_everything(42, workers=True),
        torch.rand(3).tolist(),
        isinstance(kit.root.seed_everything(), int),
    )


@equal
def weights_by_the_numbers(kit: Framework) -> Any:
    """The weights after two epochs."""
    task = kit.line()
    kit.trainer().fit(task, data(), data())
    return weights(task)


@equal
def written_predictions(kit: Framework) -> Any:
    """BasePredictionWriter.write_on_epoch_end: predictions, and batch_indices of each loader."""
    seen: list[Any] = []

    class Writer(kit.callbacks.BasePredictionWriter):  # type: ignore[misc, name-defined]
        def write_on_epoch_end(
            self, trainer: Any, task: Any, predictions: Any, batch_indices: Any
        ) -> None:
            sizes = [len(prediction) for prediction in predictions]
            seen.append((sizes, [[list(places) for places in own] for own in batch_indices]))

    task = kit.line(predict_step=lambda self, batch, batch_idx: self(batch[0]))
    kit.trainer(callbacks=[Writer("epoch")]).predict(task, data(20))
    return seen


class Played(Dataset[Any]):
    """Notes the step in which each sample is made."""

    def __init__(self, made: list[Any]) -> None:
        self.made = made
        self.task: Any = None

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self.made.append((index, self.task.global_step))
        return torch.ones(2), torch.ones(1)


@equal
def data_of_the_policy(kit: Framework) -> Any:
    """Samples that a data set makes from the weights are those of the step that trains on them."""
    played = Played([])
    played.task = kit.line()
    kit.trainer(max_epochs=1).fit(played.task, DataLoader(played, batch_size=2))
    return played.made


class Stream(IterableDataset[Any]):
    """Played, one sample after the other, without a length."""

    def __init__(self, played: Played) -> None:
        self.played = played

    def __iter__(self) -> Any:
        return map(self.played.__getitem__, range(64))


@differs(
    "There a stream without a length is read one batch ahead of its step; here when its step begins."
)
def stream_of_the_policy(kit: Framework) -> Any:
    """Samples that a stream makes from the weights."""
    played = Played([])
    played.task = kit.line()
    kit.trainer(max_epochs=1).fit(played.task, DataLoader(Stream(played), batch_size=2))
    return played.made


@equal
def extras_of_a_checkpoint(kit: Framework) -> Any:
    """load_from_checkpoint calls on_load_checkpoint with what on_save_checkpoint added."""

    def on_save_checkpoint(self: Any, checkpoint: Any) -> None:
        checkpoint["labels"] = ["cat", "dog"]

    def on_load_checkpoint(self: Any, checkpoint: Any) -> None:
        self.labels = checkpoint["labels"]

    kept = {"on_save_checkpoint": on_save_checkpoint, "on_load_checkpoint": on_load_checkpoint}
    task = kit.line(**kept)
    saving = kit.callbacks.ModelCheckpoint(dirpath=str(kit.folder / "kept"))
    kit.trainer(callbacks=[saving], enable_checkpointing=True).fit(task, data())
    loaded = type(task).load_from_checkpoint(saving.best_model_path)
    return loaded.labels, weights(loaded) == weights(task)


@equal
def extras_of_an_evaluations_checkpoint(kit: Framework) -> Any:
    """test(ckpt_path=...) calls on_load_checkpoint of the Task and of callbacks."""
    heard: list[Any] = []

    class Tags(kit.callbacks.Callback):  # type: ignore[name-defined, misc]
        def on_save_checkpoint(self, trainer: Any, task: Any, checkpoint: Any) -> None:
            checkpoint["tags"] = ["a"]

        def on_load_checkpoint(self, trainer: Any, task: Any, checkpoint: Any) -> None:
            heard.append(("callback", checkpoint["tags"], checkpoint["labels"]))

    def on_save_checkpoint(self: Any, checkpoint: Any) -> None:
        checkpoint["labels"] = ["cat", "dog"]

    def on_load_checkpoint(self: Any, checkpoint: Any) -> None:
        heard.append(("task", checkpoint["tags"], checkpoint["labels"]))

    own = {
        "test_step": lambda self, batch, batch_idx: None,
        "on_save_checkpoint": on_save_checkpoint,
        "on_load_checkpoint": on_load_checkpoint,
    }
    saving = kit.callbacks.ModelCheckpoint(dirpath=str(kit.folder / "kept"))
    kit.trainer(callbacks=[saving, Tags()], enable_checkpointing=True).fit(kit.line(**own), data())
    assert not heard
    kit.trainer(callbacks=[Tags()]).test(kit.line(**own), data(), ckpt_path=saving.best_model_path)
    return sorted(heard)


@equal
def dropped_argument(kit: Framework) -> Any:
    """load_from_checkpoint by a class that lacks a saved argument leaves it out."""
    base = line_of(kit.Module)

    class Wide(base):  # type: ignore[misc, valid-type]
        def __init__(self, width: int, scale: float = 1.0) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Narrow(base):  # type: ignore[misc, valid-type]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    saving = kit.callbacks.ModelCheckpoint(dirpath=str(kit.folder / "kept"))
    task = Wide(3, scale=2.0)
    kit.trainer(callbacks=[saving], enable_checkpointing=True).fit(task, data())
    loaded = Narrow.load_from_checkpoint(saving.best_model_path)
    return loaded.hparams["width"], dict(loaded.hparams), weights(loaded) == weights(task)


def rebuilt(kind: Any, kit: Framework, given: Any, **loading: Any) -> Any:
    """Train a Task of one argument, and return what load_from_checkpoint makes of it."""
    saving = kit.callbacks.ModelCheckpoint(dirpath=str(kit.folder / "kept"))
    task = kind(given)
    kit.trainer(callbacks=[saving], enable_checkpointing=True, max_epochs=1).fit(task, data())
    loaded = kind.load_from_checkpoint(saving.best_model_path, **loading)
    return dict(loaded.hparams), loaded.used, weights(loaded) == weights(task), str(loaded.device)


def of_a_config(kit: Framework) -> Any:
    """Return the class of a Task that saves a config, which has a default."""

    class Net(line_of(kit.Module)):  # type: ignore[misc]
        def __init__(self, conf: Any = None) -> None:
            super().__init__()
            conf = conf or {"width": 1, "sizes": (1, 2)}
            self.save_hyperparameters(conf)
            self.used = conf["width"]

    return Net


@equal
def built_of_one_config(kit: Framework) -> Any:
    """load_from_checkpoint of save_hyperparameters(conf), a dict: given, and its default."""
    given = {"width": 5, "sizes": (3,)}
    return [
        rebuilt(of_a_config(kit), kit._replace(folder=kit.folder / str(place)), conf)
        for place, conf in enumerate((given, None))
    ]


@equal
def built_of_one_config_with_changes(kit: Framework) -> Any:
    """load_from_checkpoint(path, width=9) of save_hyperparameters(conf): conf has it."""
    return rebuilt(of_a_config(kit), kit, {"width": 5}, width=9, map_location="cpu")


@equal
def built_on_a_device(kit: Framework) -> Any:
    """load_from_checkpoint(path, map_location)."""
    return rebuilt(of_a_config(kit), kit, {"width": 5}, map_location=torch.device("cpu"))


@refused("load_from_checkpoint: hparams_file: A checkpoint holds what save_hyperparameters saved")
def built_of_a_file(kit: Framework) -> Any:
    """load_from_checkpoint(path, hparams_file=...)."""
    kit.folder.mkdir()
    file = kit.folder / "hparams.yaml"
    file.write_text("width: 3")
    return rebuilt(of_a_config(kit), kit, {"width": 5}, hparams_file=str(file))
