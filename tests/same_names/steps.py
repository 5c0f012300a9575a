"""Behaviours of a step: hooks, rates, gradients."""

from __future__ import annotations

from typing import Any

import torch

from tests.same_names.kit import Framework, data, line_of, weights
from tests.same_names.table import differs, equal, refused

STEP = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def noting(name: str, calls: list[str]) -> Any:
    """Return a hook that writes its name down."""
    return lambda self, *args, **more: calls.append(name)


def calls_of(kit: Framework, base: Any, names: Any, **settings: Any) -> list[str]:
    """Train with hooks that write their names down; `base` is the Module or the Callback."""
    calls: list[str] = []
    spied = {name: noting(name, calls) for name in names}
    if base is kit.Callback:
        kit.trainer(callbacks=[type("Spy", (base,), spied)()], **settings).fit(
            kit.line(), data(), data()
        )
    else:
        kit.trainer(**settings).fit(kit.line(**spied), data(), data())
    return calls


def rates_of(kit: Framework, task: Any, **settings: Any) -> list[float]:
    """Train; return the rate of each update."""
    rates: list[float] = []

    class Read(kit.Callback):  # type: ignore[name-defined, misc]
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            rates.append(round(optimizer.param_groups[0]["lr"], 6))

    kit.trainer(callbacks=[Read()], **settings).fit(task, data())
    return rates


@equal
def order_in_a_step(kit: Framework) -> Any:
    """Order of a Callback's hooks in a step."""
    return calls_of(kit, kit.Callback, STEP, max_steps=2)


@equal
def order_in_a_step_of_a_module(kit: Framework) -> Any:
    """Order of a module's hooks in a step."""
    return calls_of(kit, kit.Module, STEP, max_steps=2)


@equal
def order_under_accumulation(kit: Framework) -> Any:
    """Order of the hooks with accumulate_grad_batches=2, a short last step included."""
    return calls_of(kit, kit.Callback, STEP, accumulate_grad_batches=2, max_epochs=1)


@equal
def order_of_a_fit(kit: Framework) -> Any:
    """Order of a fit's hooks around its epochs and validations."""
    ends = [
        f"on_{what}_{end}" for what in ("fit", "train", "train_epoch") for end in ("start", "end")
    ]
    ends += [
        f"on_{what}_{end}"
        for what in ("validation", "validation_epoch")
        for end in ("start", "end")
    ]
    return calls_of(kit, kit.Callback, [*ends, "setup", "teardown", "on_validation_batch_end"])


@equal
def hooks_of_the_sanity_check(kit: Framework) -> Any:
    """Hooks of the sanity check."""
    names = [
        "on_sanity_check_start",
        "on_sanity_check_end",
        "on_validation_start",
        "on_train_start",
    ]
    return calls_of(kit, kit.Callback, names, num_sanity_val_steps=2, max_epochs=1)


@equal
def gradients_before_the_update(kit: Framework) -> Any:
    """Gradients in on_before_optimizer_step are not clipped yet."""
    seen: list[Any] = []

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        seen.append([round(g, 5) for g in self.layer.weight.grad.reshape(-1).tolist()])

    task = kit.line(on_before_optimizer_step=on_before_optimizer_step)
    kit.trainer(max_steps=3, gradient_clip_val=0.1).fit(task, data())
    return seen, weights(task)


@equal
def clipping_by_value(kit: Framework) -> Any:
    """gradient_clip_algorithm="value"."""
    task = kit.line()
    kit.trainer(gradient_clip_val=0.2, gradient_clip_algorithm="value").fit(task, data())
    return weights(task)


@equal
def weights_after_the_update(kit: Framework) -> Any:
    """Weights and global_step in on_train_batch_end are those after the update."""
    seen: list[Any] = []

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        seen.append((self.global_step, self.trainer.global_step, batch_idx, weights(self)))

    kit.trainer().fit(kit.line(on_train_batch_end=on_train_batch_end), data())
    return seen


@equal
def steps_counted_in_hooks(kit: Framework) -> Any:
    """global_step and current_epoch in the other hooks."""
    seen: list[Any] = []

    def note(name: str) -> Any:
        return lambda self, *args: seen.append((name, self.global_step, self.current_epoch))

    names = (
        "on_train_batch_start",
        "on_before_optimizer_step",
        "on_train_epoch_start",
        "on_train_epoch_end",
        "on_train_end",
    )
    kit.trainer().fit(kit.line(**{name: note(name) for name in names}), data())
    return [row for row in seen if row[0] != "on_train_end"]


@equal
def an_average_in_batch_end(kit: Framework) -> Any:
    """An average of the weights, kept in on_train_batch_end."""
    mean: list[float] = []

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        value = float(self.layer.bias)
        mean.append(0.9 * mean[-1] + 0.1 * value if mean else value)

    kit.trainer(accumulate_grad_batches=2).fit(
        kit.line(on_train_batch_end=on_train_batch_end), data(rows=32)
    )
    return [round(value, 5) for value in mean]


@equal
def a_clamp_in_batch_end(kit: Framework) -> Any:
    """WGAN's clamp of the weights in on_train_batch_end."""

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.layer.weight.clamp_(-0.2, 0.2)

    task = kit.line(on_train_batch_end=on_train_batch_end)
    kit.trainer().fit(task, data())
    return weights(task)


@equal
def an_average_in_before_zero_grad(kit: Framework) -> Any:
    """An average of the weights, kept in on_before_zero_grad."""
    seen: list[Any] = []

    def on_before_zero_grad(self: Any, optimizer: Any) -> None:
        grad = self.layer.weight.grad
        seen.append(
            (
                weights(self),
                None if grad is None else [round(g, 5) for g in grad.reshape(-1).tolist()],
            )
        )

    kit.trainer().fit(kit.line(on_before_zero_grad=on_before_zero_grad), data())
    return seen


@equal
def gradients_in_batch_end(kit: Framework) -> Any:
    """Gradients are still there in on_train_batch_end."""
    seen: list[Any] = []

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        seen.append([round(g, 5) for g in self.layer.weight.grad.reshape(-1).tolist()])

    kit.trainer().fit(kit.line(on_train_batch_end=on_train_batch_end), data())
    return seen


def outputs_of(kit: Framework, step: Any, **settings: Any) -> Any:
    """Return what on_train_batch_end gets."""
    seen: list[Any] = []

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        seen.append(
            {key: (round(float(value), 5), value.requires_grad) for key, value in outputs.items()}
        )

    kit.trainer(**settings).fit(kit.line(on_train_batch_end=on_train_batch_end, **step), data())
    return seen


@equal
def outputs_of_a_tensor(kit: Framework) -> Any:
    """`outputs` in on_train_batch_end, where the step returns a tensor."""
    return outputs_of(kit, {})


@equal
def outputs_of_a_dict(kit: Framework) -> Any:
    """`outputs` in on_train_batch_end, where the step returns a dict."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return {"loss": loss, "twice": 2 * loss.detach()}

    return outputs_of(kit, {"training_step": training_step})


@differs(
    "There the loss in `outputs` is divided by accumulate_grad_batches; here it is the step's own."
)
def outputs_under_accumulation(kit: Framework) -> Any:
    """`outputs["loss"]` with accumulate_grad_batches=2."""
    return outputs_of(kit, {}, accumulate_grad_batches=2)


@equal
def batch_start_ends_the_epoch(kit: Framework) -> Any:
    """on_train_batch_start that returns -1 ends the epoch."""
    seen: list[int] = []

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> Any:
        seen.append(batch_idx)
        return -1 if batch_idx == 2 else None

    task = kit.line(on_train_batch_start=on_train_batch_start)
    trainer = kit.trainer()
    trainer.fit(task, data())
    return seen, trainer.global_step, weights(task)


@equal
def a_batch_is_skipped(kit: Framework) -> Any:
    """training_step that returns None skips the batch."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else self.loss(batch)

    task = kit.line(training_step=training_step)
    kit.trainer().fit(task, data())
    return weights(task)


@equal
def hooks_on_an_instance(kit: Framework) -> Any:
    """Hooks and steps that are set on an instance are called."""
    calls: list[str] = []
    task, callback = kit.line(), kit.Callback()
    task.on_train_epoch_end = lambda: calls.append("task")
    callback.on_train_epoch_start = lambda trainer, module: calls.append("callback")
    task.training_step = lambda batch, batch_idx: (
        2 * type(task).training_step(task, batch, batch_idx)
    )
    kit.trainer(callbacks=[callback]).fit(task, data())
    return calls, weights(task)


@equal
def hooks_set_in_setup(kit: Framework) -> Any:
    """Hooks that setup() sets on its instance are called."""
    calls: list[str] = []

    def setup(self: Any, stage: str) -> None:
        self.on_train_epoch_end = lambda: calls.append("end")

    kit.trainer().fit(kit.line(setup=setup), data())
    return calls


@refused("on_train_epoch_end is set on the instance while it trains: it would never be called")
def hooks_set_while_training(kit: Framework) -> Any:
    """Hooks that are set on an instance while it trains."""
    calls: list[str] = []

    def on_train_epoch_start(self: Any) -> None:
        self.on_train_epoch_end = lambda: calls.append("end")

    task = kit.line(on_train_epoch_start=on_train_epoch_start)
    kit.trainer().fit(task, data())
    return calls


@equal
def a_step_without_batch_idx(kit: Framework) -> Any:
    """training_step(self, batch) and validation_step(self, batch)."""

    def training_step(self: Any, batch: Any) -> Any:
        return self.loss(batch)

    def validation_step(self: Any, batch: Any) -> None:
        self.log("val_loss", self.loss(batch))

    task = kit.line(training_step=training_step, validation_step=validation_step)
    trainer = kit.trainer()
    trainer.fit(task, data(), data())
    return weights(task), round(float(trainer.callback_metrics["val_loss"]), 5)


@equal
def a_predict_step_without_batch_idx(kit: Framework) -> Any:
    """predict_step(self, batch)."""

    def predict_step(self: Any, batch: Any) -> Any:
        return self(batch[0])

    found = kit.trainer().predict(kit.line(predict_step=predict_step), data())
    return [round(float(value), 5) for value in torch.cat(list(found)).reshape(-1)]


@equal
def a_rate_of_epoch_start(kit: Framework) -> Any:
    """A rate that is set in on_train_epoch_start holds."""

    def on_train_epoch_start(self: Any) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.05 / 2**self.current_epoch

    return rates_of(kit, kit.line(on_train_epoch_start=on_train_epoch_start), max_epochs=3)


@equal
def a_rate_of_train_start(kit: Framework) -> Any:
    """A rate that is set in on_train_start holds."""

    def on_train_start(self: Any) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.01

    return rates_of(kit, kit.line(on_train_start=on_train_start))


@equal
def a_rate_beside_a_scheduler(kit: Framework) -> Any:
    """A rate that is set by hand is the one that the scheduler moves on."""

    def on_train_epoch_start(self: Any) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.02

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    members = {
        "on_train_epoch_start": on_train_epoch_start,
        "configure_optimizers": configure_optimizers,
    }
    return rates_of(kit, kit.line(**members), max_epochs=4)


@equal
def a_rate_of_each_step(kit: Framework) -> Any:
    """A warm-up of the user's own, in on_train_batch_start."""

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.01 * (1 + self.global_step)

    return rates_of(kit, kit.line(on_train_batch_start=on_train_batch_start))


@equal
def a_rate_around_the_update(kit: Framework) -> Any:
    """A warm-up of the user's own, in optimizer_step, with its epoch and batch_idx."""
    read: list[Any] = []

    def optimizer_step(
        self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + self.trainer.global_step)
        loss = optimizer.step(closure=optimizer_closure)
        read.append((epoch, batch_idx, round(float(loss), 5), self.trainer.global_step))
        assert optimizer.state_dict()["param_groups"][0]["lr"] > 0

    task = kit.line(optimizer_step=optimizer_step)
    kit.trainer(max_epochs=2, accumulate_grad_batches=2).fit(task, data(16))
    return read, weights(task)


@equal
def a_schedule_after_the_update(kit: Framework) -> Any:
    """A scheduler of the user's own, whose step() follows super().optimizer_step()."""

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        self.__dict__["own"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return optimizer

    def optimizer_step(self: Any, *args: Any, **kwargs: Any) -> None:
        super(type(self), self).optimizer_step(*args, **kwargs)
        self.own.step()

    members = {"configure_optimizers": configure_optimizers, "optimizer_step": optimizer_step}
    return rates_of(kit, kit.line(**members), max_epochs=2)


@refused("changes weights before")
def weights_before_the_closure(kit: Framework) -> Any:
    """optimizer_step that changes weights before optimizer.step: gradients are computed before it."""

    def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        with torch.no_grad():
            self.layer.weight.mul_(0.9)
        optimizer.step(closure=closure)

    kit.trainer(max_epochs=1).fit(kit.line(optimizer_step=optimizer_step), data())


@refused("optimizer_step returned without")
def no_update(kit: Framework) -> Any:
    """optimizer_step that makes no update."""
    task = kit.line(optimizer_step=lambda self, epoch, batch_idx, optimizer, closure: closure())
    kit.trainer(max_epochs=1).fit(task, data())


def clipping_of(method: Any) -> Any:
    """Return a behaviour: the weights, and what configure_gradient_clipping was called with."""

    def run(kit: Framework, **settings: Any) -> Any:
        read: list[Any] = []

        def configure_gradient_clipping(
            self: Any, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
        ) -> None:
            read.append((self.current_epoch, self.global_step, gradient_clip_val))
            method(self, optimizer, gradient_clip_val, gradient_clip_algorithm)

        task = kit.line(configure_gradient_clipping=configure_gradient_clipping)
        kit.trainer(max_epochs=2, accumulate_grad_batches=2, **settings).fit(task, data(16))
        return read, weights(task)

    return run


@equal
def clipping_by_super(kit: Framework) -> Any:
    """configure_gradient_clipping that hands on what the Trainer has."""

    def clips(self: Any, optimizer: Any, value: Any, algorithm: Any) -> None:
        super(type(self), self).configure_gradient_clipping(optimizer, value, algorithm)

    own = clipping_of(clips)
    return own(kit, gradient_clip_val=0.3), own(kit, gradient_clip_val=None)


@equal
def clipping_by_epoch(kit: Framework) -> Any:
    """configure_gradient_clipping that calls clip_gradients in the second epoch, by value."""

    def clips(self: Any, optimizer: Any, value: Any, algorithm: Any) -> None:
        if self.current_epoch == 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")

    return clipping_of(clips)(kit)


@equal
def clipping_by_torch(kit: Framework) -> Any:
    """configure_gradient_clipping with torch's clip_grad_norm_, which logs the norm."""

    def clips(self: Any, optimizer: Any, value: Any, algorithm: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.log("norm", norm)

    return clipping_of(clips)(kit)


@equal
def clipping_within_the_update(kit: Framework) -> Any:
    """configure_gradient_clipping is called within optimizer.step of optimizer_step."""
    read: list[str] = []

    def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        read.append("before")
        optimizer.step(closure=closure)
        read.append("after")

    def configure_gradient_clipping(self: Any, optimizer: Any, *args: Any, **more: Any) -> None:
        read.append("clip")
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    task = kit.line(
        optimizer_step=optimizer_step, configure_gradient_clipping=configure_gradient_clipping
    )
    kit.trainer(max_epochs=1).fit(task, data())
    return read, weights(task)


def stepping_of(kit: Framework, made: Any, step: Any, more: Any = (), **settings: Any) -> Any:
    """Train with a scheduler that lr_scheduler_step steps; return its calls and the rates.

    Args:
        made: takes the optimizer, returns what configure_optimizers says of the scheduler.
        step: takes what lr_scheduler_step does.
        more: further methods of the task.
    """
    calls: list[Any] = []

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": made(optimizer)}

    def lr_scheduler_step(self: Any, scheduler: Any, metric: Any) -> None:
        value = None if metric is None else round(float(metric), 5)
        calls.append((type(scheduler).__name__, value, self.current_epoch, self.global_step))
        step(self, scheduler, metric)

    members = {
        "configure_optimizers": configure_optimizers,
        "lr_scheduler_step": lr_scheduler_step,
        **dict(more),
    }
    return calls, rates_of(kit, kit.line(**members), **settings)


@equal
def stepping_by_super(kit: Framework) -> Any:
    """lr_scheduler_step that hands on to the base class, by epochs and by steps."""

    def steps(self: Any, scheduler: Any, metric: Any) -> None:
        super(type(self), self).lr_scheduler_step(scheduler, metric)

    def made(interval: str) -> Any:
        kind = torch.optim.lr_scheduler.ExponentialLR
        return lambda optimizer: {"scheduler": kind(optimizer, 0.9), "interval": interval}

    return [stepping_of(kit, made(interval), steps, max_epochs=3) for interval in ("epoch", "step")]


@equal
def stepping_at_times(kit: Framework) -> Any:
    """lr_scheduler_step that leaves a warm-up of three steps out."""

    def steps(self: Any, scheduler: Any, metric: Any) -> None:
        if self.global_step > 3:
            scheduler.step()

    def made(optimizer: Any) -> Any:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"scheduler": scheduler, "interval": "step"}

    return stepping_of(kit, made, steps, max_epochs=2)


@equal
def stepping_by_a_value(kit: Framework) -> Any:
    """lr_scheduler_step of ReduceLROnPlateau gets the monitored value."""

    def steps(self: Any, scheduler: Any, metric: Any) -> None:
        scheduler.step(metric + 1)

    def made(optimizer: Any) -> Any:
        kind = torch.optim.lr_scheduler.ReduceLROnPlateau
        scheduler = kind(optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs")
        return {"scheduler": scheduler, "monitor": "loss"}

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    return stepping_of(kit, made, steps, {"training_step": training_step}, max_epochs=4)


@equal
def stepping_of_timm(kit: Framework) -> Any:
    """A scheduler of timm, by epochs and by steps."""
    from timm.scheduler import CosineLRScheduler

    def by_epochs(self: Any, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch + 1)

    def by_updates(self: Any, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(num_updates=self.global_step)

    def made(by_epoch: bool) -> Any:
        length = {"t_initial": 6 if by_epoch else 24, "warmup_t": 2 if by_epoch else 7}
        more = {"lr_min": 1e-3, "warmup_lr_init": 1e-2, "t_in_epochs": by_epoch}
        return lambda optimizer: {
            "scheduler": CosineLRScheduler(optimizer, **length, **more),
            "interval": "epoch" if by_epoch else "step",
        }

    return [
        stepping_of(kit, made(by_epoch), step, max_epochs=6)
        for by_epoch, step in ((True, by_epochs), (False, by_updates))
    ]


@equal
def momentum_by_hand(kit: Framework) -> Any:
    """Momentum and weight decay that are set by hand hold."""

    def on_train_epoch_start(self: Any) -> None:
        self.trainer.optimizers[0].param_groups[0].update(
            momentum=0.5 * self.current_epoch, weight_decay=0.1
        )

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)

    task = kit.line(
        on_train_epoch_start=on_train_epoch_start, configure_optimizers=configure_optimizers
    )
    kit.trainer(max_epochs=3).fit(task, data())
    return weights(task)


def scheduled(kit: Framework, make: Any, members: Any = None, **settings: Any) -> Any:
    """Return the rates under a scheduler's dict; `members` are more of the task's."""

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": make(optimizer)}

    task = kit.line(configure_optimizers=configure_optimizers, **(members or {}))
    return rates_of(kit, task, max_epochs=4, **settings)


@equal
def a_scheduler_of_epochs(kit: Framework) -> Any:
    """A scheduler that moves after each epoch."""
    return scheduled(kit, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1))


def plateau(optimizer: Any) -> Any:
    """Return a scheduler that moves each time it is asked."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)


@equal
def a_plateau_by_the_plain_name(kit: Framework) -> Any:
    """ReduceLROnPlateau on a value of on_step=True, on_epoch=True, by its plain name."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    watched = lambda optimizer: {"scheduler": plateau(optimizer), "monitor": "loss"}  # noqa: E731
    return scheduled(kit, watched, {"training_step": training_step})


@differs(
    "There it moves after each epoch, by the last value again, so that patience counts epochs; here"
    " after each validation, and a line says so."
)
def a_plateau_that_waits(kit: Framework) -> Any:
    """ReduceLROnPlateau on a value of validation, with check_val_every_n_epoch=2."""
    more = {"monitor": "val_loss", "strict": False}  # true: an error there in the first epoch
    watched = lambda optimizer: {"scheduler": plateau(optimizer), **more}  # noqa: E731
    members = {"val_dataloader": lambda self: data()}
    return scheduled(kit, watched, members, check_val_every_n_epoch=2)


@equal
def a_monitor_beside_the_scheduler(kit: Framework) -> Any:
    """configure_optimizers that returns "monitor" beside "optimizer" and "lr_scheduler"."""

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = {"lr_scheduler": plateau(optimizer), "monitor": "val_loss"}
        return {"optimizer": optimizer} | schedule

    task = kit.line(configure_optimizers=configure_optimizers, val_dataloader=lambda self: data())
    return rates_of(kit, task, max_epochs=4)


@equal
def a_monitor_without_use(kit: Framework) -> Any:
    """A "monitor" of StepLR, with check_val_every_n_epoch=2: it moves after each epoch."""
    kind = torch.optim.lr_scheduler.StepLR
    watched = lambda optimizer: {  # noqa: E731
        "scheduler": kind(optimizer, 1, 0.1),
        "monitor": "val_loss",
    }
    members = {"val_dataloader": lambda self: data()}
    return scheduled(kit, watched, members, check_val_every_n_epoch=2)


@equal
def a_scheduler_of_steps(kit: Framework) -> Any:
    """A scheduler with interval "step"."""
    kind = torch.optim.lr_scheduler.ExponentialLR
    return scheduled(kit, lambda optimizer: {"scheduler": kind(optimizer, 0.9), "interval": "step"})


@differs("There a frequency counts the batches of each epoch; here it counts the run's updates.")
def a_scheduler_with_a_frequency(kit: Framework) -> Any:
    """A scheduler with interval "step" and frequency 2, in epochs of 5 batches."""
    kind = torch.optim.lr_scheduler.ExponentialLR
    return scheduled(
        kit,
        lambda optimizer: {"scheduler": kind(optimizer, 0.9), "interval": "step", "frequency": 2},
    )


@equal
def a_warmup_by_lambda(kit: Framework) -> Any:
    """LambdaLR with a warm-up from 0."""
    kind = torch.optim.lr_scheduler.LambdaLR
    return scheduled(
        kit,
        lambda opt: {"scheduler": kind(opt, lambda step: min(1.0, step / 5)), "interval": "step"},
    )


@differs(
    "There a scheduler with interval step counts batches under accumulation; here it counts"
    " updates, as in a plain loop."
)
def a_scheduler_of_steps_accumulated(kit: Framework) -> Any:
    """A scheduler with interval "step", with accumulate_grad_batches=2."""
    kind = torch.optim.lr_scheduler.ExponentialLR
    make = lambda optimizer: {  # noqa: E731
        "scheduler": kind(optimizer, 0.9),
        "interval": "step",
        "frequency": 3,
    }
    return scheduled(kit, make, accumulate_grad_batches=2)


@differs(
    "There the last, short window of an epoch is divided by N as well; here each sample weighs the"
    " same."
)
def the_last_window(kit: Framework) -> Any:
    """The last window of an epoch with accumulate_grad_batches=2 and 5 batches."""
    task = kit.line()
    kit.trainer(accumulate_grad_batches=2).fit(task, data())
    return weights(task)


@equal
def accumulation(kit: Framework) -> Any:
    """accumulate_grad_batches where it divides the epoch."""
    task = kit.line()
    trainer = kit.trainer(accumulate_grad_batches=2)
    trainer.fit(task, data(rows=32))
    return weights(task), trainer.global_step


@equal
def optimizers_for_reading(kit: Framework) -> Any:
    """self.optimizers() and self.lr_schedulers() can be read under automatic optimization."""
    seen: list[Any] = []

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def on_train_epoch_end(self: Any) -> None:
        seen.append((self.optimizers().param_groups[0]["lr"], self.lr_schedulers().get_last_lr()))

    kit.trainer().fit(
        kit.line(configure_optimizers=configure_optimizers, on_train_epoch_end=on_train_epoch_end),
        data(),
    )
    return seen


@refused("returned None")
def optimizers_of_none(kit: Framework) -> Any:
    """configure_optimizers that returns None trains nothing."""
    task = kit.line(configure_optimizers=lambda self: None)
    before = weights(task)
    kit.trainer(max_steps=2).fit(task, data())
    return weights(task) == before


@equal
def plain_optimizers(kit: Framework) -> Any:
    """self.optimizers(use_pl_optimizer=False), to read a rate."""
    rates: list[float] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        rates.append(self.optimizers(use_pl_optimizer=False).param_groups[0]["lr"])
        return self.loss(batch)

    kit.trainer(max_steps=3).fit(kit.line(training_step=training_step), data())
    return rates


@refused("would leave the other ranks out")
def plain_optimizers_by_hand(kit: Framework) -> Any:
    """self.optimizers(use_pl_optimizer=False) in manual optimization."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.optimizers(use_pl_optimizer=False)

    task = kit.line(training_step=training_step)
    task.automatic_optimization = False
    kit.trainer(max_epochs=1).fit(task, data())


@equal
def clearing_of_gradients(kit: Framework) -> Any:
    """optimizer_zero_grad with set_to_none, and what it sees."""
    read: list[Any] = []

    def on_before_zero_grad(self: Any, optimizer: Any) -> None:
        read.append("before")

    def optimizer_zero_grad(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
        grad = self.layer.weight.grad
        read.append((epoch, batch_idx, None if grad is None else round(float(grad.sum()), 4)))
        optimizer.zero_grad(set_to_none=True)

    members = {
        "on_before_zero_grad": on_before_zero_grad,
        "optimizer_zero_grad": optimizer_zero_grad,
    }
    task = kit.line(**members)
    kit.trainer(max_epochs=2, accumulate_grad_batches=2).fit(task, data(16))
    return read, weights(task)


@refused("Modes are set before an evaluation")
def own_eval_mode(kit: Framework) -> Any:
    """on_validation_model_eval is overridden."""
    task = kit.line(on_validation_model_eval=lambda self: self.eval())
    kit.trainer(max_steps=1).fit(task, data(), data())


@refused("L-?BFGS")
def lbfgs(kit: Framework) -> Any:
    """LBFGS under automatic optimization."""
    task = kit.line(configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters()))
    kit.trainer(max_steps=1).fit(task, data())


def overridden(name: str) -> Any:
    """Return a behaviour that overrides a method."""

    def run(kit: Framework) -> Any:
        def method(self: Any, *args: Any, **more: Any) -> Any:
            return getattr(super(type(self), self), name)(*args, **more)

        kit.trainer(max_steps=1).fit(kit.line(**{name: method}), data())

    run.__doc__ = f"{name} is overridden."
    return run


for method_name in (
    "backward",
    "configure_sharded_model",
):
    refused(method_name)(overridden(method_name))


def gan_of(kit: Framework, **settings: Any) -> Any:
    """Train with two optimizers by hand, as a GAN does; return the steps and the weights."""

    def __init__(self: Any) -> None:
        line_of(kit.Module).__init__(self)  # type: ignore[misc]

    class Gan(line_of(kit.Module)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            for optimizer, model in ((first, self.layer), (second, self.other)):
                optimizer.zero_grad()
                self.manual_backward((model(batch[0]) - batch[1]).pow(2).mean())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(model.parameters(), lr=0.02) for model in (self.layer, self.other)
            ]

    task, trainer = Gan(), kit.trainer(**settings)
    trainer.fit(task, data())
    return trainer.global_step, weights(task)


@equal
def manual_steps(kit: Framework) -> Any:
    """global_step counts optimizer steps under manual optimization."""
    return gan_of(kit)


@equal
def manual_limit(kit: Framework) -> Any:
    """max_steps counts optimizer steps under manual optimization."""
    return gan_of(kit, max_steps=6)


@differs(
    "There gradient_clip_val is refused; here it clips each optimizer's gradients, summed over"
    " ranks."
)
def manual_clipping(kit: Framework) -> Any:
    """gradient_clip_val under manual optimization."""
    try:
        return gan_of(kit, gradient_clip_val=0.01)
    except Exception as error:  # Lightning's
        return type(error).__name__
