"""Loop: a training loop that the user writes, on the Trainer's engine.

    with trainkit.Loop(model, optimizer, train_loader, val_loader, max_epochs=3) as loop:
        for epoch in loop.epochs():
            for x, y in loop.batches():
                loop.backward(cross_entropy(model(x), y))
            for x, y in loop.validation():
                loop.log("val/loss", cross_entropy(model(x), y))

Trainer.fit runs in a greenlet of its own, with a Task that passes each batch to the user's loop and
waits for the loss. The two take turns in one thread, so autocast of the one holds in the other, and
whatever a fit does (accumulation, sums over ranks, checkpoints, elastic recovery) is the same code.
Whether gradients are recorded is each one's own (modes.py).

    user's loop                      fit
    batches()            <- batch -  training_step
    backward(loss)       - loss ->   engine.backward; the update, if this is the step's last batch
                         <--------   on_train_batch_end
    batches() again      -------->   validation, if it is due; the next batch
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor, nn

from trainkit.api.task import Task
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.by_hand.gradient_watch import GradientWatch
from trainkit.extensions.by_hand.modes import FitModes
from trainkit.extensions.by_hand.schedulers import report_longer, schedulers_of
from trainkit.extensions.by_hand.task import (
    Batch,
    GivenOptimizers,
    Kind,
    LoopTurns,
    module_of,
    scheduler_of,
    task_of,
)
from trainkit.optim.forms import ScheduleConfig, refuse_wrapped
from trainkit.trainer import Trainer


class Loop:
    """See the module. A context manager: entering it starts the fit, up to its first batch.

    The rates of `optimizer` follow the contract of batch and rate, as a Task's do, and the Loop
    updates the weights: never call `optimizer.step()`, and leave gradients as they are. Whatever
    decides how many batches the user's loop reads must be the same on all ranks.

    Args:
        model: a module, or a dict or list of modules; moved to this rank's device.
        optimizer: one, or a list; all of them update at each step.
        train_dataloaders: as in `Trainer.fit`.
        val_dataloaders: as in `Trainer.fit`.
        lr_scheduler: a scheduler (or Lightning's dict of one), stepped after each epoch; or a list,
            one for each optimizer. A scheduler of the optimizer that is not given here is the
            user's to step, after `backward`, as in a plain loop.
        ckpt_path: as in `Trainer.fit`; "auto" resumes the run in `run_dir`, if there is one.
        settings: of the Trainer.

    Attributes:
        state: the user's own values, saved in checkpoints and restored from them; numbers, strings,
            tensors, lists, dicts.
        history: the values of each epoch, once the fit has ended; see `Trainer.fit`.

    Raises:
        ConfigError: `model` is a Task, or a setting cannot work here.
        TaskError: an optimizer is another library's around the one that it updates.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        train_dataloaders: Any,
        val_dataloaders: Any = None,
        *,
        lr_scheduler: Any = None,
        ckpt_path: str | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(model, Task):
            raise ConfigError(
                "Loop: model is a Task, which has a training_step of its own. Pass it to"
                " Trainer.fit."
            )
        if settings.get("halve_batch_on_oom"):
            raise ConfigError(
                "Loop: halve_batch_on_oom is true, but a forward pass in your own loop cannot be"
                " repeated. Leave it out, and set global_batch_size with a smaller batch of the"
                " loader: the rest is accumulated."
            )
        self.trainer = Trainer(**{"num_sanity_val_steps": 0, **settings})
        optimizers = (
            [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        )
        for each in optimizers:
            refuse_wrapped(each)
            each.register_step_pre_hook(self._refuse_step)
        self.state: dict[str, Any] = {}
        self.history: list[dict[str, float]] = []
        schedulers = (
            lr_scheduler
            if isinstance(lr_scheduler, (list, tuple))
            else [lr_scheduler]
            if lr_scheduler
            else []
        )
        given_schedulers = [scheduler_of(given) for given in schedulers]
        by_hand = schedulers_of(optimizers, given_schedulers)
        self._schedulers = [*given_schedulers, *by_hand]
        module = module_of(model)
        configured = GivenOptimizers(
            module, optimizers, [*schedulers, *(ScheduleConfig(each, "hand") for each in by_hand)]
        )
        self._task = task_of(
            module, configured, LoopTurns(self._pass, self._after_batch, self.state)
        )
        self._watch = GradientWatch(optimizers)
        self._data = (train_dataloaders, val_dataloaders)
        self._ckpt_path = ckpt_path
        self._fit = greenlet(self._run_fit)
        self._user = getcurrent()
        self._next: Batch | None = None  # passed by the fit, not read yet
        self._reading: Batch | None = None  # in the body of the user's loop
        self._loss: Any = None  # what the fit waits for
        self._modes = FitModes()
        # a rank was lost in this batch's backward: the step is taken again, with other batches
        self._is_lost = False

    def _run_fit(self) -> None:
        self.history = self.trainer.fit(self._task, *self._data, ckpt_path=self._ckpt_path)

    # -- the user's side --------------------------------------------------------------------------------------------

    def __enter__(self) -> Loop:
        self._modes = FitModes()
        self._switch()
        if self._next is not None:
            report_longer(self._schedulers, self._task.trainer)
        return self

    def epochs(self) -> Iterator[int]:
        """Yield the epoch until the fit ends; the same one again if validation came inside of it.

        Raises:
            TaskError: the body has read no batch, or the Loop was not entered.
        """
        self._check_entered()
        while (first := self._next) is not None:
            yield first.epoch
            self._check_left()
            if self._next is first:
                reader = "batches()" if first.kind == "train" else "validation()"
                raise TaskError(
                    f"The body of `for epoch in loop.epochs()` must read loop.{reader}: there are"
                    " such data."
                )

    def batches(self) -> Iterator[Any]:
        """Yield this rank's batches of the epoch, on its device, up to the next validation.
        Call `backward` for each.
        """
        return self._read("train")

    def validation(self) -> Iterator[Any]:
        """Yield this rank's validation batches, without gradients, if a validation is due.
        Log a batch's mean with `log`.
        """
        return self._read("val")

    def _read(self, kind: Kind) -> Iterator[Any]:
        self._check_entered()
        self._check_left()
        epoch = None if self._next is None else self._next.epoch
        while (batch := self._next) is not None and batch.kind == kind and batch.epoch == epoch:
            self._reading = batch
            self._next = None
            with torch.no_grad() if kind == "val" else contextlib.nullcontext():
                yield batch.data
            if self._is_lost:
                self._is_lost = False
                continue
            if kind == "train" and self._loss is None:
                raise TaskError(
                    "loop.backward(loss) was not called for this batch. Call it once for each of"
                    " loop.batches()."
                )
            self._watch.check()
            self._reading = None
            self._switch()

    def backward(self, loss: Tensor, num_samples: Tensor | float | None = None) -> None:
        """Add this batch's gradients to the step's, and update the weights if it is the step's last
        batch.

        Args:
            loss: the mean over the batch's samples, a scalar with grad.
            num_samples: the batch's weight in its step, if it is not the number of samples: its
                tokens, for example.

        Raises:
            TaskError: this batch is one of validation, or had its backward; or gradients of the
                step's earlier batches were changed.
        """
        batch = self._reading
        if batch is None or batch.kind != "train":
            raise TaskError("loop.backward() was called outside of a batch of loop.batches().")
        if self._loss is not None:
            raise TaskError(
                "loop.backward() was called twice for this batch. Call it once, with the sum of the"
                " losses."
            )
        self._watch.check()
        step = self.global_step
        self._loss = loss if num_samples is None else {"loss": loss, "num_samples": num_samples}
        self._switch()
        self._is_lost = self._reading is not batch
        if not self._is_lost:
            self._watch.after_backward(self.global_step != step)

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Log a value: in a batch as `Task.log` does; between batches, as it is."""
        if self._is_lost:
            return
        if self._reading is not None:
            self._task.log(name, value, **options)
        elif self._next is not None and self._next.kind == "train" or not self._fit:
            self._task.trainer.log_metrics({name: float(value)})

    def stop(self) -> None:
        """End after the current step, as a limit would: validated and saved.
        Call it on all ranks.
        """
        self._task.trainer.request_stop("loop.stop() was called")

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._task.trainer.engine.device

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._task.trainer.engine.ranks.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._task.trainer.engine.ranks.world_size

    @property
    def dataloader_idx(self) -> int:
        """The number of the validation loader that the current batch is from,
        if there are several.
        """
        return 0 if self._reading is None else self._reading.loader

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self._task.global_step

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0 only."""
        self._task.print(*values, **options)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fit.dead:
            self._modes.end()
            return
        step = self.global_step
        try:
            with self._modes.turn(lambda: self.device):
                self._fit.throw(GreenletExit if error is None else error)
        except BaseException as raised:
            if raised is not error:
                raise
            raised.__traceback__ = trace  # without the fit's frames
        if error is None:
            self.print(
                f"The loop was left at step {step}, and nothing was saved there. To end with a"
                " checkpoint, call loop.stop()."
            )

    # -- turns ------------------------------------------------------------------------------------------------------

    def _switch(self) -> None:
        """Let the fit run until it passes a batch, or has run backward, or has ended."""
        self._user = getcurrent()
        self._fit.parent = self._user  # errors of the fit are raised here
        with self._modes.turn(lambda: self.device):
            self._fit.switch()

    def _pass(self, batch: Batch) -> Any:
        """In the fit: pass a batch to the user's loop; return the loss."""
        if batch.kind == "train":
            self._watch.before_body()
        self._next = batch
        self._reading = None
        self._loss = None
        self._user.switch()
        return self._loss

    def _after_batch(self) -> None:
        """In the fit: let the user's body continue."""
        self._user.switch()

    def _check_entered(self) -> None:
        """Without the fit there is no batch, and the user's loops would end at once."""
        if not self._fit and not self._fit.dead:
            raise TaskError(
                "The Loop was not entered, so nothing would be trained. Write `with"
                " trainkit.Loop(...) as loop:` around the loop over epochs."
            )

    def _check_left(self) -> None:
        if self._reading is not None:
            reader = "batches()" if self._reading.kind == "train" else "validation()"
            raise TaskError(
                f"The loop over loop.{reader} was left before its end. To end training, call"
                " loop.stop()."
            )

    def _refuse_step(self, *_: Any) -> None:
        if self._fit and getcurrent() is not self._fit:
            raise TaskError(
                "optimizer.step() was called in the loop. Leave it out: the Loop updates the"
                " weights after each step."
            )
