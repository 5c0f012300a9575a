"""Behaviours of manual optimization, and of the hooks of an evaluation."""

from __future__ import annotations

import csv
from typing import Any

import torch

from tests.same_names.kit import Framework, data, weights
from tests.same_names.table import equal


def by_hand(kit: Framework, step: Any, members: Any = None, **settings: Any) -> Any:
    """Train an epoch with a training_step that runs backward and the optimizer; return the task."""

    def init(self: Any) -> None:
        super(type(self), self).__init__()
        self.automatic_optimization = False

    task = kit.line(__init__=init, training_step=step, **(members or {}))
    kit.trainer(max_epochs=1, **settings).fit(task, data(16))
    return task


def forward_after(kit: Framework, update: Any, **settings: Any) -> Any:
    """Train by hand; return what the model gave before and after each update."""
    given: list[float] = []

    def step(self: Any, batch: Any, batch_idx: int) -> None:
        given.append(round(float(self(batch[0]).sum()), 2))
        update(self, batch)
        given.append(round(float(self(batch[0]).sum()), 2))

    by_hand(kit, step, precision="bf16-mixed", **settings)
    return given


def update_by(task: Any, batch: Any) -> None:
    """Update by hand."""
    optimizer = task.optimizers()
    optimizer.zero_grad()
    task.manual_backward(task.loss(batch))
    optimizer.step()


@equal
def a_forward_after_an_update(kit: Framework) -> Any:
    """A forward after optimizer.step() in the same training_step, at precision="bf16-mixed"."""

    return forward_after(kit, update_by)


@equal
def a_forward_after_a_clamp(kit: Framework) -> Any:
    """A forward after weights were clamped in the same training_step, at "bf16-mixed"."""

    def update(self: Any, batch: Any) -> None:
        with torch.no_grad():
            self.layer.weight.clamp_(-0.1, 0.1)

    return forward_after(kit, update)


@equal
def closures_by_hand(kit: Framework) -> Any:
    """optimizer.step(closure) by hand with L-BFGS, and clipping: weights, hooks, counted steps."""
    calls: list[str] = []

    def step(self: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            calls.append("closure")
            return loss

        optimizer.step(closure)

    def before(self: Any, optimizer: Any) -> None:
        calls.append("before")

    def optimizers(self: Any) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    members = {"on_before_optimizer_step": before, "configure_optimizers": optimizers}
    task = by_hand(kit, step, members)
    return calls, weights(task), task.trainer.global_step


@equal
def a_scheduler_by_hand_with_a_place(kit: Framework) -> Any:
    """lr_schedulers().step(epoch + part) of CosineAnnealingWarmRestarts, by hand: the rates."""
    rates: list[float] = []

    def step(self: Any, batch: Any, batch_idx: int) -> None:
        self.lr_schedulers().step(self.current_epoch + batch_idx / 2)
        rates.append(round(self.optimizers().param_groups[0]["lr"], 6))

    def optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        make = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts
        return [optimizer], [make(optimizer, T_0=1)]

    by_hand(kit, step, {"configure_optimizers": optimizers})
    return rates


@equal
def a_plateau_by_hand(kit: Framework) -> Any:
    """lr_schedulers().step(value, epoch) of a ReduceLROnPlateau, by hand: the rates."""
    rates: list[float] = []

    def step(self: Any, batch: Any, batch_idx: int) -> None:
        self.lr_schedulers().step(-float(batch_idx), batch_idx)
        rates.append(round(self.optimizers().param_groups[0]["lr"], 6))

    def optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "x"}}

    by_hand(kit, step, {"configure_optimizers": optimizers})
    return rates


@equal
def outputs_by_hand(kit: Framework) -> Any:
    """outputs of on_train_batch_end by hand: of a tensor, a dict and None."""
    shown: list[Any] = []

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return (loss, {"loss": loss, "more": 1})[batch_idx]

    def end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss")
        shown.append((sorted(outputs), None if loss is None else loss.requires_grad))

    def nothing(self: Any, batch: Any, batch_idx: int) -> None:
        pass

    for one in (step, nothing):
        by_hand(kit, one, {"on_train_batch_end": end})
    return shown


@equal
def values_by_hand_over_epochs(kit: Framework) -> Any:
    """log by hand of epochs that are shorter than log_every_n_steps: the batches with a value."""

    def init(self: Any) -> None:
        super(type(self), self).__init__()
        self.automatic_optimization = False

    def step(self: Any, batch: Any, batch_idx: int) -> None:
        update_by(self, batch)
        update_by(self, batch)
        self.log("batch", float(self.current_epoch * 2 + batch_idx))

    logger = kit.loggers.CSVLogger(str(kit.folder / "logs"), name="mine", version="v1")
    trainer = kit.trainer(logger=logger, log_every_n_steps=3, max_epochs=4)
    trainer.fit(kit.line(__init__=init, training_step=step), data(16))
    with (kit.folder / "logs" / "mine" / "v1" / "metrics.csv").open() as file:
        return [float(row["batch"]) for row in csv.DictReader(file) if row.get("batch")]


PLACES = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")


def modes_of(kit: Framework, kind: str, run: Any, **settings: Any) -> list[Any]:
    """Let `run` use a trainer and a task at "bf16-mixed"; return, of the step and each hook of this
    kind, whether the model trains, gradients are computed and autocast is on.
    """
    modes: list[Any] = []

    def noting(name: str) -> Any:
        def note(self: Any, *args: Any, **more: Any) -> None:
            on = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
            modes.append((name, self.training, *on))

        return note

    step = {"validation": "validation_step", "predict": "predict_step"}[kind]
    names = [step, *(f"on_{kind}_{place}" for place in PLACES)]
    task = kit.line(**{name: noting(name) for name in names})
    run(kit.trainer(precision="bf16-mixed", **settings), task)
    return modes


@equal
def modes_in_an_evaluation(kit: Framework) -> Any:
    """Whether the model trains, gradients are computed and autocast is on in each hook and step of
    a validation, at "bf16-mixed".
    """

    def fit(trainer: Any, task: Any) -> None:
        trainer.fit(task, data(16), data(16))

    return modes_of(kit, "validation", fit, max_epochs=1, num_sanity_val_steps=1)


@equal
def modes_in_a_prediction(kit: Framework) -> Any:
    """The same of predict."""
    return modes_of(kit, "predict", lambda trainer, task: trainer.predict(task, data(16)))
