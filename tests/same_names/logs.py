"""Behaviours of logged values, callbacks and loggers."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
import yaml

from tests.same_names.kit import Framework, data
from tests.same_names.table import differs, equal, refused


def logged(kit: Framework, step: Any, loader: Any = None, **settings: Any) -> Any:
    """Train with a training_step that logs; return callback_metrics."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        step(self, loss, batch_idx)
        return loss

    trainer = kit.trainer(log_every_n_steps=1, **settings)
    trainer.fit(kit.line(training_step=training_step), loader or data(), data())
    own = trainer.callback_metrics.items()
    return {name: round(float(value), 4) for name, value in own if name not in ("val_loss", "lr")}


@differs(
    "There callback_metrics has one rank's value of the last step too; here values of epochs, the"
    " same on all ranks."
)
def logged_by_default(kit: Framework) -> Any:
    """log in training_step without flags."""
    return logged(kit, lambda self, loss, i: self.log("loss", loss))


@equal
def logged_by_epoch(kit: Framework) -> Any:
    """log(on_step=False, on_epoch=True)."""
    return logged(kit, lambda self, loss, i: self.log("loss", loss, on_step=False, on_epoch=True))


@differs("The same: `loss` and `loss_epoch` are there, `loss_step` is not.")
def logged_both(kit: Framework) -> Any:
    """log(on_step=True, on_epoch=True): the plain name, `_step` and `_epoch`."""
    return logged(kit, lambda self, loss, i: self.log("loss", loss, on_step=True, on_epoch=True))


@differs("Validation and test log no steps, only the value over all samples; a line says so.")
def steps_of_a_validation(kit: Framework) -> Any:
    """log(on_step=True, on_epoch=True) in validation_step."""

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("v", self.loss(batch), on_step=True, on_epoch=True)

    logger = kit.loggers.CSVLogger(str(kit.folder / "logs"), name="mine", version="v1")
    trainer = kit.trainer(logger=logger, max_epochs=1)
    trainer.fit(kit.line(validation_step=validation_step), data(), data())
    header, *_ = (kit.folder / "logs" / "mine" / "v1" / "metrics.csv").read_text().splitlines()
    return sorted(name for name in header.split(",") if name.startswith("v"))


@equal
def logged_dict(kit: Framework) -> Any:
    """log_dict."""
    return logged(
        kit,
        lambda self, loss, i: self.log_dict(
            {"a": loss, "b": 2 * loss}, on_step=False, on_epoch=True
        ),
    )


def reduced(reduce_fx: Any) -> Any:
    """Return a behaviour that logs with a reduction."""

    def run(kit: Framework) -> Any:
        return logged(
            kit,
            lambda self, loss, i: self.log(
                "loss", loss, on_step=False, on_epoch=True, reduce_fx=reduce_fx
            ),
        )

    name = reduce_fx if isinstance(reduce_fx, str) else f"torch.{reduce_fx.__name__}"
    run.__doc__ = f"log(reduce_fx={name})."
    return run


for each in ("mean", "max", "min", "sum", torch.mean, torch.max, torch.min, torch.sum):
    equal(reduced(each))


@equal
def a_mean_by_batches(kit: Framework) -> Any:
    """The epoch mean of a value with batch_size=1 for each batch, where the last batch is short."""
    by_one = lambda self, loss, i: self.log(  # noqa: E731
        "loss", loss, on_step=False, on_epoch=True, batch_size=1
    )
    return logged(kit, by_one, data(36))


@equal
def a_mean_with_a_short_batch(kit: Framework) -> Any:
    """The epoch mean of a value where the last batch is short."""
    return logged(
        kit, lambda self, loss, i: self.log("loss", loss, on_step=False, on_epoch=True), data(36)
    )


@equal
def values_as_tensors(kit: Framework) -> Any:
    """callback_metrics["val_loss"].item()."""
    trainer = kit.trainer()
    trainer.fit(kit.line(), data(), data())
    value = trainer.callback_metrics["val_loss"]
    return round(value.item(), 4), round(float(value.cpu()), 4), f"{value:.3f}", bool(value < 100)


def logs_itself(name: str) -> Any:
    """Return a hook that logs under its own name."""
    return lambda self: self.log(name, 1.5)


@equal
def values_of_hooks(kit: Framework) -> Any:
    """Values that hooks of an epoch log are in callback_metrics."""
    names = ("on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end")
    members = {name: logs_itself(name) for name in names}
    trainer = kit.trainer()
    trainer.fit(kit.line(**members), data(), data())
    return sorted(set(trainer.callback_metrics) & set(names))


@equal
def values_in_hooks(kit: Framework) -> Any:
    """callback_metrics in on_validation_epoch_end has that validation's values."""
    seen: list[Any] = []

    def on_validation_epoch_end(self: Any) -> None:
        now = self.trainer
        seen.append((now.sanity_checking, round(float(now.callback_metrics["val_loss"]), 4)))

    def on_train_start(self: Any) -> None:
        seen.append("val_loss" in self.trainer.callback_metrics)

    hooks = {"on_validation_epoch_end": on_validation_epoch_end, "on_train_start": on_train_start}
    kit.trainer(num_sanity_val_steps=2).fit(kit.line(**hooks), data(), data())
    return seen


@equal
def stopping_beside_a_sanity_check(kit: Framework) -> Any:
    """EarlyStopping(check_on_train_epoch_end=False) does not count the sanity check."""
    stopping = kit.callbacks.EarlyStopping(
        "best", patience=1, mode="max", check_on_train_epoch_end=False
    )

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("best", 9.0 if self.trainer.sanity_checking else float(self.global_step))

    trainer = kit.trainer(max_epochs=3, callbacks=[stopping], num_sanity_val_steps=2)
    trainer.fit(kit.line(validation_step=validation_step), data(), data())
    return trainer.global_step, stopping.wait_count, round(float(stopping.best_score), 4)


@equal
def values_of_an_update(kit: Framework) -> Any:
    """log(on_step=False, on_epoch=True) in on_before_optimizer_step, as of a norm of gradients."""

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        norm = self.layer.weight.grad.norm()
        self.log("norm", norm, on_step=False, on_epoch=True)

    trainer = kit.trainer()
    trainer.fit(kit.line(on_before_optimizer_step=on_before_optimizer_step), data(36))
    return round(float(trainer.callback_metrics["norm"]), 4)


def callback_fit(kit: Framework, *callbacks: Any, members: Any = None, **settings: Any) -> Any:
    """Train with callbacks; return the trainer."""
    trainer = kit.trainer(callbacks=list(callbacks), **settings)
    trainer.fit(kit.line(**(members or {})), data(), data())
    return trainer


@equal
def monitor_by_its_plain_name(kit: Framework) -> Any:
    """EarlyStopping on a value of on_step=True, on_epoch=True, by its plain name."""

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), on_step=True, on_epoch=True)

    stopping = kit.callbacks.EarlyStopping("val_loss", mode="max", patience=1)
    return callback_fit(
        kit, stopping, members={"validation_step": validation_step}, max_epochs=6
    ).global_step


@equal
def early_stopping(kit: Framework) -> Any:
    """EarlyStopping: when, stopped_epoch, wait_count, best_score."""
    stopping = kit.callbacks.EarlyStopping("val_loss", mode="max", patience=2)
    trainer = callback_fit(kit, stopping, max_epochs=9)
    return (
        trainer.global_step,
        stopping.stopped_epoch,
        stopping.wait_count,
        round(float(stopping.best_score), 4),
    )


@equal
def early_stopping_within_epochs(kit: Framework) -> Any:
    """EarlyStopping with val_check_interval=2: each validation counts."""
    stopping = kit.callbacks.EarlyStopping("val_loss", mode="max", patience=2)
    trainer = callback_fit(kit, stopping, max_epochs=9, val_check_interval=2)
    return trainer.global_step, stopping.stopped_epoch, stopping.wait_count


@equal
def early_stopping_of_epochs(kit: Framework) -> Any:
    """EarlyStopping(check_on_train_epoch_end=True) with val_check_interval=2."""
    stopping = kit.callbacks.EarlyStopping(
        "val_loss", mode="max", patience=2, check_on_train_epoch_end=True
    )
    return callback_fit(kit, stopping, max_epochs=9, val_check_interval=2).global_step


@equal
def early_stopping_at_once(kit: Framework) -> Any:
    """EarlyStopping(patience=0)."""
    stopping = kit.callbacks.EarlyStopping("val_loss", mode="max", patience=0)
    return callback_fit(kit, stopping, max_epochs=9).global_step


@equal
def early_stopping_by_a_bound(kit: Framework) -> Any:
    """EarlyStopping(stopping_threshold=...)."""
    stopping = kit.callbacks.EarlyStopping("val_loss", stopping_threshold=4.0)
    return callback_fit(kit, stopping, max_epochs=30).global_step


def kept_by(kit: Framework, max_epochs: int = 4, trained: Any = None, **settings: Any) -> Any:
    """Train, under the settings `trained`, with a ModelCheckpoint; return it and the names that are
    left. `members` are of the module.
    """
    members = settings.pop("members", {})
    keeper = kit.callbacks.ModelCheckpoint(
        dirpath=str(kit.folder / "kept"), **{"save_last": False} | settings
    )
    more = {"max_epochs": max_epochs, "enable_checkpointing": True} | (trained or {})
    callback_fit(kit, keeper, members=members, **more)
    names = {path.name.removesuffix(".ckpt") for path in (kit.folder / "kept").iterdir()}
    return keeper, sorted(names - {"last", "best"})  # links, which Lightning does not make


@equal
def checkpoint_names(kit: Framework) -> Any:
    """ModelCheckpoint(filename="{epoch:02d}-{val_loss:.3f}")."""
    return kept_by(kit, monitor="val_loss", filename="{epoch:02d}-{val_loss:.3f}", save_top_k=2)[1]


@equal
def checkpoint_names_without_words(kit: Framework) -> Any:
    """ModelCheckpoint(auto_insert_metric_name=False)."""
    settings = {"filename": "e{epoch}-s{step}", "auto_insert_metric_name": False}
    return kept_by(kit, monitor="val_loss", save_top_k=1, **settings)[1]


@equal
def checkpoint_scores(kit: Framework) -> Any:
    """ModelCheckpoint's best_model_score and best_k_models."""
    keeper, _ = kept_by(kit, monitor="val_loss", save_top_k=2)
    scores = sorted(round(float(value), 4) for value in keeper.best_k_models.values())
    return round(float(keeper.best_model_score), 4), scores


@equal
def checkpoints_of_validations(kit: Framework) -> Any:
    """ModelCheckpoint(monitor="val_loss", save_top_k=3) with val_check_interval=2."""
    each = {"val_check_interval": 2}
    return kept_by(kit, 2, each, monitor="val_loss", save_top_k=3, filename="{step}")[1]


@equal
def checkpoints_of_epochs_ends(kit: Framework) -> Any:
    """ModelCheckpoint(save_on_train_epoch_end=True) with val_check_interval=2."""
    each = {"val_check_interval": 2}
    settings = {"save_on_train_epoch_end": True, "save_top_k": -1, "filename": "{step}"}
    return kept_by(kit, 2, each, **settings)[1]


@equal
def checkpoints_by_steps(kit: Framework) -> Any:
    """ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)."""
    return kept_by(kit, 2, every_n_train_steps=3, save_top_k=-1, filename="{step}")[1]


@differs(
    "Here ModelCheckpoint retains the newest too (save_last=True), so that each run can resume."
)
def checkpoints_by_default(kit: Framework) -> Any:
    """ModelCheckpoint(every_n_train_steps=3) without save_last."""
    return kept_by(kit, 2, every_n_train_steps=3, save_top_k=-1, filename="{step}", save_last=True)[
        1
    ]


@equal
def checkpoints_by_epochs(kit: Framework) -> Any:
    """ModelCheckpoint(every_n_epochs=2, save_top_k=-1)."""
    return kept_by(kit, 5, every_n_epochs=2, save_top_k=-1, filename="{epoch}")[1]


@differs(
    "There the average is of the weights at the starts of epochs, without the last; here of those"
    " at their ends."
)
def swa(kit: Framework) -> Any:
    """StochasticWeightAveraging(swa_epoch_start=3): the rates and the weights."""
    from tests.same_names.kit import weights

    task = kit.line()
    swa = kit.callbacks.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=3)
    kit.trainer(callbacks=[swa], max_epochs=6).fit(task, data())
    return weights(task)


def thawed(kit: Framework, make: Any = None, lr: float | None = 0.01, **settings: Any) -> Any:
    """Train with a layer that is frozen until a group of its own is added in the second epoch;
    return the weights. `make` makes a scheduler.
    """
    from tests.same_names.kit import weights

    class Milestones(kit.callbacks.BaseFinetuning):  # type: ignore[name-defined, misc]
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.layer)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.layer, optimizer, lr=lr)

    def __init__(self: Any) -> None:
        type(self).__mro__[1].__init__(self)
        self.other = torch.nn.Linear(2, 1)

    def loss(self: Any, batch: Any) -> Any:
        return (self(batch[0]) + self.other(batch[0]) - batch[1]).pow(2).mean()

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)
        if make is None:
            return optimizer
        schedule = {"scheduler": make(optimizer), "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    task = kit.line(__init__=__init__, loss=loss, configure_optimizers=configure_optimizers)
    settings = {"callbacks": [Milestones()], "max_epochs": 3} | settings
    kit.trainer(**settings).fit(task, data(), data())
    return weights(task)


@equal
def freezing(kit: Framework) -> Any:
    """BaseFinetuning: freeze, and unfreeze_and_add_param_group."""
    return thawed(kit)


@equal
def freezing_under_schedulers(kit: Framework) -> Any:
    """unfreeze_and_add_param_group under ReduceLROnPlateau, ChainedScheduler and SequentialLR."""
    from torch.optim import lr_scheduler as kinds

    def sequence(optimizer: Any) -> Any:
        parts = [kinds.LinearLR(optimizer, total_iters=2), kinds.ExponentialLR(optimizer, 0.9)]
        return kinds.SequentialLR(optimizer, parts, [1])

    def chain(optimizer: Any) -> Any:
        return kinds.ChainedScheduler([kinds.ExponentialLR(optimizer, rate) for rate in (0.9, 0.8)])

    def plateau(optimizer: Any) -> Any:
        return kinds.ReduceLROnPlateau(
            optimizer, patience=0, threshold=1e9, factor=0.1, min_lr=0.002
        )

    return [thawed(kit, make, max_epochs=5) for make in (plateau, chain, sequence)]


def of_a_backbone(kit: Framework, alone: bool = False, **settings: Any) -> Any:
    """Train with a BackboneFinetuning that thaws after two epochs; return all weights.

    Args:
        alone: the optimizer has only what is trained at first.
    """
    from tests.same_names.kit import weights

    def __init__(self: Any) -> None:
        type(self).__mro__[1].__init__(self)
        self.backbone = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))

    def loss(self: Any, batch: Any) -> Any:
        return (self(self.backbone(batch[0])) - batch[1]).pow(2).mean()

    def configure_optimizers(self: Any) -> Any:
        if alone:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.02)
        parts = [{"params": part.parameters()} for part in (self.layer, self.backbone)]
        return torch.optim.SGD(parts, lr=0.02)

    task = kit.line(__init__=__init__, loss=loss, configure_optimizers=configure_optimizers)
    callback = kit.callbacks.BackboneFinetuning(2, **settings)
    kit.trainer(callbacks=[callback], max_epochs=4).fit(task, data())
    return weights(task)


@refused("would be trained after a thaw, but no optimizer has it")
def backbone_in_no_optimizer(kit: Framework) -> Any:
    """BackboneFinetuning with an optimizer of the parameters that are trained at first."""
    return of_a_backbone(kit, alone=True)


@differs(
    "There the backbone begins at a tenth of the first group's rate, doubled each epoch up to it;"
    " here at its groups' rate, and a line says so: backbone_initial_ratio_lr=0.1 sets theirs."
)
def backbone(kit: Framework) -> Any:
    """BackboneFinetuning(unfreeze_backbone_at_epoch=2): the backbone's rate."""
    return of_a_backbone(kit)


@differs(
    "There batch norms are trained from the start, and are no part of the group that the thaw adds;"
    " here they are frozen until then and trained from then on, and a line says so."
)
def backbone_without_norms(kit: Framework) -> Any:
    """BackboneFinetuning(train_bn=False)."""
    return of_a_backbone(kit, train_bn=False)


@equal
def lambda_callback(kit: Framework) -> Any:
    """LambdaCallback."""
    seen: list[str] = []
    callback = kit.callbacks.LambdaCallback(on_train_epoch_end=lambda *args: seen.append("end"))
    callback_fit(kit, callback)
    return seen


@equal
def folders_of_a_logger(kit: Framework) -> Any:
    """CSVLogger's save_dir, name, version and log_dir."""
    logger = kit.loggers.CSVLogger(str(kit.folder / "logs"), name="mine", version="v1")
    kit.trainer(logger=logger, max_epochs=1, log_every_n_steps=1).fit(kit.line(), data(), data())
    where = str(kit.folder)
    return (
        logger.save_dir.replace(where, ""),
        logger.name,
        logger.version,
        logger.log_dir.replace(where, ""),
    )


@differs(
    "Without `version` it is `<save_dir>/<name>/<the run's folder>`, and without `name` no folder"
    " stands between; there `lightning_logs/version_0`, `version_1`."
)
def folders_of_a_logger_by_default(kit: Framework) -> Any:
    """CSVLogger's and TensorBoardLogger's name and version where they are not given."""
    loggers = [
        getattr(kit.loggers, f"{name}Logger")(str(kit.folder / "logs"))
        for name in ("CSV", "TensorBoard")
    ]
    kit.trainer(logger=loggers, max_epochs=1).fit(kit.line(), data(), data())
    return [logger.log_dir.replace(str(kit.folder), "") for logger in loggers]


@equal
def state_key(kit: Framework) -> Any:
    """Callback.state_key of an own callback."""
    return type("Mine", (kit.Callback,), {})().state_key


@refused("monitor|not logged|log")
def a_monitor_that_is_not_there(kit: Framework) -> Any:
    """EarlyStopping on a value that is not logged."""
    stopping = kit.callbacks.EarlyStopping("nothing")
    try:
        callback_fit(kit, stopping)
    except RuntimeError as error:
        if kit.name == "trainkit":
            raise
        return type(error).__name__


@equal
def values_for_one_logger(kit: Framework) -> Any:
    """self.logger.log_metrics(values, step) in a hook."""
    logger = kit.loggers.CSVLogger(str(kit.folder / "logs"), name="mine", version="v1")

    def on_train_epoch_end(self: Any) -> None:
        self.logger.log_metrics({"x": torch.tensor(2.0), "y": 3}, step=self.current_epoch + 7)

    task = kit.line(on_train_epoch_end=on_train_epoch_end)
    kit.trainer(logger=logger).fit(task, data(), data())
    header, *rows = (kit.folder / "logs" / "mine" / "v1" / "metrics.csv").read_text().splitlines()
    cells = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    return [(cell["step"], float(cell["x"]), float(cell["y"])) for cell in cells if cell["x"]]


@equal
def settings_for_one_logger(kit: Framework) -> Any:
    """logger.log_hyperparams before a fit: a dict, then a Namespace."""
    logger = kit.loggers.CSVLogger(str(kit.folder / "logs"), name="mine", version="v1")
    logger.log_hyperparams({"width": 3, "model": {"depth": [1, 2]}})
    logger.log_hyperparams(argparse.Namespace(rate=0.1))
    kit.trainer(logger=logger).fit(kit.line(), data())
    return yaml.safe_load((kit.folder / "logs" / "mine" / "v1" / "hparams.yaml").read_text())


@equal
def a_test_after_a_fit(kit: Framework) -> Any:
    """What test_step logs after a fit: in the loggers too, at global_step and current_epoch."""
    seen: list[Any] = []

    def test_step(self: Any, batch: Any, batch_idx: int) -> None:
        seen.append((self.trainer.global_step, self.trainer.current_epoch))
        self.log("test_loss", self.loss(batch))

    logger = kit.loggers.CSVLogger(str(kit.folder / "logs"), name="mine", version="v1")
    trainer = kit.trainer(logger=logger, max_epochs=1)
    task = kit.line(test_step=test_step)
    trainer.fit(task, data(), data())
    trainer.test(task, data(), verbose=False)
    header, *rows = (kit.folder / "logs" / "mine" / "v1" / "metrics.csv").read_text().splitlines()
    cells = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    tested = [cell for cell in cells if cell["test_loss"]]
    numbers = [(cell["epoch"], cell["step"], float(cell["test_loss"])) for cell in tested]
    return seen, [(epoch, step, round(loss, 4)) for epoch, step, loss in numbers]


@differs("There a logged step is numbered from 0; here by the updates made, from 1.")
def step_numbers(kit: Framework) -> Any:
    """The steps in a logger's file."""
    logger = kit.loggers.CSVLogger(str(kit.folder / "logs"), name="mine", version="v1")
    task = kit.line(training_step=lambda self, batch, batch_idx: logs_loss(self, batch))
    kit.trainer(logger=logger, max_epochs=1, log_every_n_steps=2).fit(task, data())
    header, *rows = (kit.folder / "logs" / "mine" / "v1" / "metrics.csv").read_text().splitlines()
    names = header.split(",")
    return [
        int(row.split(",")[names.index("step")])
        for row in rows
        if row.split(",")[names.index("loss")]
    ]


def logs_loss(task: Any, batch: Any) -> Any:
    """Log and return the loss."""
    loss = task.loss(batch)
    task.log("loss", loss)
    return loss


@differs(
    "There a metric object without flags logs a step's value; here the epoch's, which is exact over"
    " all samples and ranks."
)
def a_metric_without_flags(kit: Framework) -> Any:
    """log("x", metric) in training_step without flags."""
    torchmetrics = pytest.importorskip("torchmetrics")

    def __init__(self: Any) -> None:
        type(self).__mro__[1].__init__(self)
        self.mean = torchmetrics.MeanMetric()

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.mean(loss.detach())
        self.log("mean", self.mean)
        return loss

    trainer = kit.trainer(log_every_n_steps=1, max_epochs=1)
    trainer.fit(kit.line(__init__=__init__, training_step=training_step), data(36))
    return round(float(trainer.callback_metrics["mean"]), 4)


@differs(
    "There BaseFinetuning.freeze(train_bn=False) leaves batch norms in training mode; here their"
    " statistics are frozen too."
)
def frozen_norms(kit: Framework) -> Any:
    """BaseFinetuning.freeze(train_bn=False)."""
    norm = torch.nn.BatchNorm1d(2)
    kit.callbacks.BaseFinetuning.freeze(norm, train_bn=False)
    return norm.training


@refused(r"log\('x', on_step=True or on_epoch=False\) in a hook of an epoch or of the run")
def steps_of_an_epoch_hook(kit: Framework) -> Any:
    """log(on_step=True) in on_train_epoch_end."""
    members = {"on_train_epoch_end": lambda self: self.log("x", 1.0, on_step=True)}
    try:
        kit.trainer(max_epochs=1).fit(kit.line(**members), data())
    except Exception as error:
        if kit.name == "trainkit":
            raise
        return type(error).__name__


@differs("There a checkpoint is made after a validation; here after each epoch as well, to resume.")
def checkpoints_without_a_validation(kit: Framework) -> Any:
    """ModelCheckpoint(save_top_k=-1) with check_val_every_n_epoch=2: how many there are."""
    saving = kit.callbacks.ModelCheckpoint(dirpath=str(kit.folder / "all"), save_top_k=-1)
    callback_fit(kit, saving, max_epochs=4, check_val_every_n_epoch=2, enable_checkpointing=True)
    return len([path for path in (kit.folder / "all").iterdir() if path.name.startswith("epoch=")])


@differs("There a list of a dict for each loader; here one dict, of which [0] is the dict as well.")
def results_of_a_test(kit: Framework) -> Any:
    """What trainer.test returns."""
    task = kit.line(test_step=lambda self, batch, batch_idx: self.log("x", 2.0))
    results = kit.trainer().test(task, data(), verbose=False)
    assert results[0]["x"] == 2.0
    return len(results), type(next(iter(results)))


@equal
def hidden_values(kit: Framework) -> Any:
    """logged_metrics has no values of log(..., logger=False), callback_metrics has them."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("hidden", loss, logger=False, on_step=False, on_epoch=True)
        self.log("shown", loss, on_step=False, on_epoch=True)
        return loss

    trainer = kit.trainer()
    trainer.fit(kit.line(training_step=training_step), data(), data())
    return sorted(trainer.logged_metrics), sorted(trainer.callback_metrics)


@equal
def value_of_a_validations_end(kit: Framework) -> Any:
    """A value of on_validation_epoch_end in callback_metrics, in the hooks after it."""
    seen: list[Any] = []

    def on_validation_epoch_end(self: Any) -> None:
        self.log("own", 1.0 + self.current_epoch)

    def note(self: Any, trainer: Any, task: Any) -> None:
        seen.append(float(trainer.callback_metrics.get("own", -1.0)))

    hooks = ("on_validation_epoch_end", "on_validation_end", "on_train_epoch_end")
    callback = type("Notes", (kit.Callback,), dict.fromkeys(hooks, note))()
    task = kit.line(on_validation_epoch_end=on_validation_epoch_end)
    kit.trainer(callbacks=[callback]).fit(task, data(), data())
    return seen


@differs(
    "There a hook reads its own rank's value at once; here the value of all ranks is there after the"
    " callbacks' and the Task's hooks of that name."
)
def value_of_the_hook_itself(kit: Framework) -> Any:
    """A value of on_train_epoch_end in callback_metrics, in that hook."""
    seen: list[Any] = []

    def on_train_epoch_end(self: Any) -> None:
        self.log("own", 1.0 + self.current_epoch)
        seen.append(float(self.trainer.callback_metrics.get("own", -1.0)))

    kit.trainer().fit(kit.line(on_train_epoch_end=on_train_epoch_end), data())
    return seen


@differs(
    "There a metric object that is not logged is the Task's to reset; here fit, validate, test and"
    " predict begin with all of them reset: counts of an interrupted run do not belong to the next."
)
def metric_after_a_test(kit: Framework) -> Any:
    """A torchmetrics object that training_step updates and nothing logs, after fit and test."""
    torchmetrics = pytest.importorskip("torchmetrics")

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        return loss

    task = kit.line(training_step=training_step, test_step=lambda self, batch, batch_idx: None)
    task.mean = torchmetrics.MeanMetric()
    trainer = kit.trainer()
    trainer.fit(task, data())
    after_fit = task.mean.update_count
    trainer.test(task, data())
    return after_fit, task.mean.update_count
