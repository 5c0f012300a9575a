"""Behaviours of two runs: one that ends, and one that resumes from its checkpoint with something
changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.same_names.kit import Framework, data, weights
from tests.same_names.table import differs, equal, refused


def logged_line(kit: Framework, **members: Any) -> Any:
    """Return a linear model that logs `a`, its loss, and `b`, -a, of each epoch."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(batch)
        self.log_dict({"a": loss, "b": -loss}, on_step=False, on_epoch=True)
        return loss

    return kit.line(**{"training_step": training_step} | members)


def resumed(kit: Framework, before: Sequence[Any], after: Sequence[Any], epochs: int = 4) -> Any:
    """Train two epochs with callbacks, resume with others, and train to the end; return the trainer
    that resumed.
    """
    first = kit.callbacks.ModelCheckpoint(dirpath=str(kit.folder / "first"), monitor="a")
    settings = {"enable_checkpointing": True}
    kit.trainer(callbacks=[*before, first], **settings).fit(logged_line(kit), data())
    trainer = kit.trainer(callbacks=list(after), max_epochs=epochs)
    trainer.fit(logged_line(kit), data(), ckpt_path=first.best_model_path)
    return trainer


def stopper(kit: Framework, monitor: str, **settings: Any) -> Any:
    """Return an EarlyStopping."""
    return kit.callbacks.EarlyStopping(monitor=monitor, patience=5, **settings)


def heard(stopper: Any) -> Any:
    """Return what an EarlyStopping has counted."""
    return round(float(stopper.best_score), 4), stopper.wait_count


@equal
def stopping_of_another_value(kit: Framework) -> Any:
    """A resumed run's EarlyStopping of another value: its best score."""
    after = stopper(kit, "a")
    resumed(kit, [stopper(kit, "b")], [after])
    return heard(after)


@equal
def stopping_of_another_mode(kit: Framework) -> Any:
    """A resumed run's EarlyStopping of another mode: its best score."""
    after = stopper(kit, "a", mode="max")
    resumed(kit, [stopper(kit, "a")], [after])
    return heard(after)


@equal
def stopping_in_another_order(kit: Framework) -> Any:
    """A resumed run's two EarlyStoppings in another order."""
    after = [stopper(kit, "b"), stopper(kit, "a")]
    resumed(kit, [stopper(kit, "a"), stopper(kit, "b")], after)
    return [heard(one) for one in after]


@equal
def one_stopping_less(kit: Framework) -> Any:
    """A resumed run's second EarlyStopping, without the first."""
    after = stopper(kit, "b")
    resumed(kit, [stopper(kit, "a"), stopper(kit, "b")], [after])
    return heard(after)


def best_of(kit: Framework, **settings: Any) -> Any:
    """Return the best score of a ModelCheckpoint of another run's folder, by `a` before."""
    folder = str(kit.folder / "first")
    first = kit.callbacks.ModelCheckpoint(dirpath=folder, monitor="a", save_last=True)
    kit.trainer(callbacks=[first], enable_checkpointing=True).fit(logged_line(kit), data())
    after = kit.callbacks.ModelCheckpoint(dirpath=folder, **settings)
    trainer = kit.trainer(callbacks=[after], enable_checkpointing=True, max_epochs=4)
    trainer.fit(logged_line(kit), data(), ckpt_path=first.best_model_path)
    return round(float(after.best_model_score), 4)


@equal
def best_by_another_value(kit: Framework) -> Any:
    """A resumed run's ModelCheckpoint of another monitor: its best score."""
    return best_of(kit, monitor="b", mode="max")


@equal
def best_by_another_mode(kit: Framework) -> Any:
    """A resumed run's ModelCheckpoint of another mode: its best score."""
    return best_of(kit, monitor="a", mode="max")


@equal
def own_state_keys(kit: Framework) -> Any:
    """Callbacks of one class of different state_key, in another order."""

    class Named(kit.Callback):  # type: ignore[name-defined, misc]
        def __init__(self, name: str) -> None:
            self.name, self.read = name, ""

        @property
        def state_key(self) -> str:
            return f"Named of {self.name}"

        def state_dict(self) -> Any:
            return {"name": self.name}

        def load_state_dict(self, state_dict: Any) -> None:
            self.read = state_dict["name"]

    after = [Named("q"), Named("p")]
    resumed(kit, [Named("p"), Named("q")], after)
    return [one.read for one in after]


@equal
def checkpoint_as_path(kit: Framework) -> Any:
    """ckpt_path as a pathlib.Path, by fit and by validate."""
    folder = kit.folder / "first"
    saving = kit.callbacks.ModelCheckpoint(dirpath=folder)
    kit.trainer(callbacks=[saving], enable_checkpointing=True).fit(kit.line(), data())
    path = Path(saving.best_model_path)
    trainer = kit.trainer(max_epochs=3)
    trainer.fit(kit.line(), data(), ckpt_path=path)
    values = kit.trainer().validate(kit.line(), data(), ckpt_path=path)[0]
    return trainer.global_step, round(float(values["val_loss"]), 4)


def split_module(kit: Framework, made: list[Any]) -> Any:
    """Return a DataModule that notes its state when it makes a loader."""

    class Split(kit.DataModule):  # type: ignore[name-defined, misc]
        part = 0

        def train_dataloader(self) -> Any:
            made.append(("train", self.part))
            return data()

        def val_dataloader(self) -> Any:
            made.append(("val", self.part))
            return data()

        def test_dataloader(self) -> Any:
            made.append(("test", self.part))
            return data()

        predict_dataloader = test_dataloader

        def state_dict(self) -> Any:
            return {"part": self.part}

        def load_state_dict(self, state_dict: Any) -> None:
            self.part = state_dict["part"]

    return Split()


@equal
def state_of_a_datamodule(kit: Framework) -> Any:
    """A DataModule has its state back before its loaders are made: in fit, validate, test, predict."""
    made: list[Any] = []
    steps = {"test_step": lambda self, batch, i: None, "predict_step": lambda self, batch, i: i}
    first = split_module(kit, made)
    first.part = 7
    saving = kit.callbacks.ModelCheckpoint(dirpath=str(kit.folder / "first"))
    kit.trainer(callbacks=[saving], enable_checkpointing=True).fit(kit.line(), datamodule=first)
    made.clear()
    for name in ("fit", "validate", "test", "predict"):
        run = getattr(kit.trainer(max_epochs=3), name)
        given = {"datamodule": split_module(kit, made), "ckpt_path": saving.best_model_path}
        run(kit.line(**steps), **given)
    return sorted(made)


@differs(
    "There validate, test and predict call load_state_dict of callbacks; here fit alone does: it is"
    " the state of a training. on_load_checkpoint is called by all."
)
def state_of_callbacks_in_an_evaluation(kit: Framework) -> Any:
    """test(ckpt_path=...): load_state_dict of callbacks."""
    read: list[Any] = []

    class Counts(kit.Callback):  # type: ignore[name-defined, misc]
        def state_dict(self) -> Any:
            return {"n": 3}

        def load_state_dict(self, state_dict: Any) -> None:
            read.append(state_dict)

    saving = kit.callbacks.ModelCheckpoint(dirpath=str(kit.folder / "first"))
    kit.trainer(callbacks=[Counts(), saving], enable_checkpointing=True).fit(kit.line(), data())
    task = kit.line(test_step=lambda self, batch, batch_idx: None)
    kit.trainer(callbacks=[Counts()]).test(task, data(), ckpt_path=saving.best_model_path)
    return read


def renamed(kit: Framework, loader: Any) -> Any:
    """Return what fit, test and load_from_checkpoint make of a Task that saves its weights under
    other names.
    """

    def on_save_checkpoint(self: Any, checkpoint: Any) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {f"old.{name}": value for name, value in state.items()}
        checkpoint["steps"] = checkpoint["global_step"]

    def on_load_checkpoint(self: Any, checkpoint: Any) -> None:
        state = checkpoint["state_dict"]
        for name in list(state):
            state[name.removeprefix("old.")] = state.pop(name)
        self.read = checkpoint["steps"], checkpoint["global_step"]

    hooks = {"on_save_checkpoint": on_save_checkpoint, "on_load_checkpoint": on_load_checkpoint}
    saving = kit.callbacks.ModelCheckpoint(dirpath=str(kit.folder / "first"))
    task = kit.line(test_step=lambda self, batch, i: None, **hooks)
    kit.trainer(callbacks=[saving], enable_checkpointing=True).fit(task, loader)
    path = saving.best_model_path
    new = [type(task)() for _ in range(2)]
    kit.trainer(max_epochs=4).fit(new[0], loader, ckpt_path=path)
    kit.trainer().test(new[1], loader, ckpt_path=path)
    loaded = type(task).load_from_checkpoint(path)
    return [(one.read, weights(one)) for one in (*new, loaded)], weights(loaded) == weights(task)


@equal
def renamed_weights(kit: Framework) -> Any:
    """A Task that renames weights in on_save_checkpoint and on_load_checkpoint: fit, test, load."""
    return renamed(kit, data())


@equal
def renamed_weights_alone(kit: Framework) -> Any:
    """Hooks that rename weights, and save_weights_only=True: test and load_from_checkpoint."""

    def on_save_checkpoint(self: Any, checkpoint: Any) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {f"old.{name}": value for name, value in state.items()}

    def on_load_checkpoint(self: Any, checkpoint: Any) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name[len("old.") :]: value for name, value in state.items()}

    hooks = {"on_save_checkpoint": on_save_checkpoint, "on_load_checkpoint": on_load_checkpoint}
    saving = kit.callbacks.ModelCheckpoint(
        dirpath=str(kit.folder / "first"), save_weights_only=True
    )
    task = kit.line(test_step=lambda self, batch, i: None, **hooks)
    kit.trainer(callbacks=[saving], enable_checkpointing=True).fit(task, data())
    new = type(task)()
    kit.trainer().test(new, data(), ckpt_path=saving.best_model_path)
    loaded = type(task).load_from_checkpoint(saving.best_model_path)
    return weights(new), weights(loaded), weights(new) == weights(task)


@equal
def dropped_head(kit: Framework) -> Any:
    """on_load_checkpoint fills what on_save_checkpoint left out."""

    def on_save_checkpoint(self: Any, checkpoint: Any) -> None:
        del checkpoint["state_dict"]["layer.bias"]

    def on_load_checkpoint(self: Any, checkpoint: Any) -> None:
        checkpoint["state_dict"]["layer.bias"] = torch.full((1,), 3.0)

    hooks = {"on_save_checkpoint": on_save_checkpoint, "on_load_checkpoint": on_load_checkpoint}
    saving = kit.callbacks.ModelCheckpoint(dirpath=str(kit.folder / "first"))
    task = kit.line(test_step=lambda self, batch, i: None, **hooks)
    kit.trainer(callbacks=[saving], enable_checkpointing=True).fit(task, data())
    kit.trainer().test(task, data(), ckpt_path=saving.best_model_path)
    return weights(task)


@equal
def order_of_reading(kit: Framework) -> Any:
    """on_load_checkpoint and load_state_dict of callbacks, after the weights: their order."""
    heard: list[Any] = []

    class Notes(kit.Callback):  # type: ignore[name-defined, misc]
        def state_dict(self) -> Any:
            return {"n": 3}

        def load_state_dict(self, state_dict: Any) -> None:
            heard.append(("state", state_dict["n"]))

        def on_load_checkpoint(self, trainer: Any, task: Any, checkpoint: Any) -> None:
            heard.append(("callback", trainer.global_step, checkpoint["epoch"], weights(task)))

    def on_load_checkpoint(self: Any, checkpoint: Any) -> None:
        heard.append(("task", weights(self)))

    saving = kit.callbacks.ModelCheckpoint(dirpath=str(kit.folder / "first"))
    kit.trainer(callbacks=[Notes(), saving], enable_checkpointing=True).fit(kit.line(), data())
    task = kit.line(on_load_checkpoint=on_load_checkpoint)
    kit.trainer(callbacks=[Notes()], max_epochs=3).fit(
        task, data(), ckpt_path=saving.best_model_path
    )
    return heard


@refused(r"checkpoint\['optimizer_states'\] is not there for a hook\. Optimizers and schedules")
def optimizer_states_of_a_hook(kit: Framework) -> Any:
    """on_load_checkpoint reads checkpoint["optimizer_states"]."""

    def on_load_checkpoint(self: Any, checkpoint: Any) -> None:
        checkpoint["optimizer_states"] = []

    saving = kit.callbacks.ModelCheckpoint(dirpath=str(kit.folder / "first"))
    kit.trainer(callbacks=[saving], enable_checkpointing=True).fit(kit.line(), data())
    task = kit.line(on_load_checkpoint=on_load_checkpoint)
    kit.trainer(max_epochs=3).fit(task, data(), ckpt_path=saving.best_model_path)
    return weights(task)
