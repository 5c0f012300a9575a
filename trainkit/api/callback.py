"""Callback: observes a run. No callback is needed for correct training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainkit.api.fixed_hooks import FixedHooks
from trainkit.api.media_logging import LogsMedia
from trainkit.api.task import Task
from trainkit.api.view import Role, RunView
from trainkit.engine.step_settings import Need
from trainkit.errors import TaskError
from trainkit.metrics.media import Media

_SAVE: tuple[Role | None, ...] = ("checkpoints", "elastic")  # after all others, in this order


class Callback(FixedHooks, LogsMedia):
    """Override the hooks that you need; each runs on all ranks. A hook that is not overridden costs
    nothing.

    The order of a fit (a batch is one microbatch of this rank; a step is one optimizer update):

        setup, on_fit_start, on_sanity_check_start/end, on_train_start
        each epoch:  on_train_epoch_start
            each step:  on_train_step_start
                each batch:  on_train_batch_start, on_before_zero_grad (of the step's first one),
                on_before_backward,
                    on_after_backward, on_train_batch_end (of the step's last one: after the update)
                on_before_optimizer_step, on_after_optimizer_step, on_train_step_end
            on_validation_start, on_validation_epoch_start, on_validation_batch_start/end,
            on_validation_epoch_end,
                on_validation_end
            on_train_epoch_end
        on_train_end, on_fit_end, teardown

    `on_exception` is called if the run ends with an error; not if a signal ends it
    (trainkit.Preempted).

    Every hook may log: `self.log("name", value)`, see Task.log.

    Attributes:
        role: what a run looks it up for, one of api/view.py's Role; None for most. Only its class
            says it: a callback is never taken for one of trainkit's by its attributes or its name,
            and one that derives from ModelCheckpoint, say, has its role.
        needs_of_engine: what it needs of a step (engine/step_settings.py's Need); an engine that
            lacks it refuses the fit.
        runs_first: its hooks run before those of all others: it measures.
        monitors: its hooks run after the Task's, and see the values that hooks have logged.
        runs_last: its hooks run after those of all others, the Task's included.
        may_differ: it only shows: its hooks wait for no other rank, which may have it with other
            settings, or not at all.
        needs_several_ranks: its hooks are not called in a run of one rank.
        uses_step_clock: it reads `step_clock_of(trainer)`, which runs only if a callback does.
        stores_media: its on_media stores pictures, texts, ...
        ends_run: it ends the run, as a time limit does; max_epochs and max_steps may then both be
            None.
    """

    role: Role | None = None
    needs_of_engine: frozenset[Need] = frozenset()
    runs_first = False
    monitors = False
    runs_last = False
    may_differ = False
    needs_several_ranks = False
    uses_step_clock = False
    stores_media = False
    ends_run = False
    _task: Task | None = None

    @property
    def state_key(self) -> str:
        """By which a checkpoint names its state, and its place among callbacks with the same one:
        its class, as Lightning's. Another one separates instances of a class.
        """
        return type(self).__qualname__

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Log a value, as the Task's `log` does."""
        if self._task is None:
            raise TaskError(
                f"{type(self).__name__}.log('{name}', ...): no Trainer runs this callback yet. Log"
                " in its hooks."
            )
        self._task.log(name, value, **options)

    def _log_media(self, make: Callable[[], Media]) -> None:
        if self._task is None:
            raise TaskError(
                f"{type(self).__name__} logs media, but no Trainer runs it yet. Log in its hooks."
            )
        self._task._log_media(make)

    def log_dict(self, values: Mapping[str, Any], **options: Any) -> None:
        """Log several values with the same options."""
        for name, value in values.items():
            self.log(name, value, **options)

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Before anything of `stage` ("fit", "validate", "test", "predict") runs."""

    def teardown(self, trainer: RunView, task: Task, stage: str) -> None:
        """After everything of `stage` has run."""

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        """After everything is built and on its device, before the first sample."""

    def on_fit_end(self, trainer: RunView, task: Task) -> None:
        """The last hook of a successful fit."""

    def on_sanity_check_start(self, trainer: RunView, task: Task) -> None:
        """Before the few validation batches that are run before training."""

    def on_sanity_check_end(self, trainer: RunView, task: Task) -> None:
        """After them."""

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Before the first epoch."""

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        """After the last epoch."""

    def on_train_epoch_start(self, trainer: RunView, task: Task) -> None:
        """Before an epoch's first step."""

    def on_train_epoch_end(self, trainer: RunView, task: Task) -> None:
        """After an epoch and its validation; `trainer.callback_metrics` holds its values."""

    def on_train_step_start(self, trainer: RunView, task: Task) -> None:
        """Before a step's first microbatch."""

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        """After the update; `trainer.global_step` counts it."""

    def on_train_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int
    ) -> None:
        """Before `training_step`."""

    def on_train_batch_end(
        self, trainer: RunView, task: Task, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a batch, or after the update if it was this rank's last of the step.

        `outputs` is the dict of `training_step`, or {"loss": ...}; its loss is detached.
        """

    def on_before_backward(self, trainer: RunView, task: Task, loss: Any) -> None:
        """`loss` is as returned, before it is weighted by the batch's share of the step."""

    def on_after_backward(self, trainer: RunView, task: Task) -> None:
        """Gradients of this rank; not yet summed over ranks."""

    def on_before_optimizer_step(self, trainer: RunView, task: Task, optimizer: Any) -> None:
        """Gradients of the whole step, summed over ranks and unscaled;
        they are clipped after it.
        """

    def on_after_optimizer_step(self, trainer: RunView, task: Task) -> None:
        """After all optimizers have updated; the gradients, clipped, are still there."""

    def on_before_zero_grad(self, trainer: RunView, task: Task, optimizer: Any) -> None:
        """Before the gradients of the last step are dropped:
        in the next step, after the first batch's `training_step`.
        """

    def on_validation_start(self, trainer: RunView, task: Task) -> None:
        """Before a validation."""

    def on_validation_epoch_start(self, trainer: RunView, task: Task) -> None:
        """Right after on_validation_start."""

    def on_validation_epoch_end(self, trainer: RunView, task: Task) -> None:
        """After the last batch; metric objects of the Task hold the samples of all ranks."""

    def on_validation_end(self, trainer: RunView, task: Task) -> None:
        """After a validation; `trainer.callback_metrics` holds its values."""

    def on_validation_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Before `validation_step`."""

    def on_validation_batch_end(
        self,
        trainer: RunView,
        task: Task,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """After `validation_step`."""

    def on_test_start(self, trainer: RunView, task: Task) -> None:
        """Before a test."""

    def on_test_epoch_start(self, trainer: RunView, task: Task) -> None:
        """Right after on_test_start."""

    def on_test_epoch_end(self, trainer: RunView, task: Task) -> None:
        """After the last batch; metric objects of the Task hold the samples of all ranks."""

    def on_test_end(self, trainer: RunView, task: Task) -> None:
        """After a test."""

    def on_test_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Before `test_step`."""

    def on_test_batch_end(
        self,
        trainer: RunView,
        task: Task,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """After `test_step`."""

    def on_predict_start(self, trainer: RunView, task: Task) -> None:
        """Before a prediction."""

    def on_predict_epoch_start(self, trainer: RunView, task: Task) -> None:
        """Right after on_predict_start."""

    def on_predict_epoch_end(self, trainer: RunView, task: Task) -> None:
        """After the last batch; metric objects of the Task hold the samples of all ranks."""

    def on_predict_end(self, trainer: RunView, task: Task) -> None:
        """After a prediction."""

    def on_predict_batch_start(
        self, trainer: RunView, task: Task, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Before `predict_step`."""

    def on_predict_batch_end(
        self,
        trainer: RunView,
        task: Task,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """After `predict_step`."""

    def on_metrics(
        self, trainer: RunView, task: Task, metrics: dict[str, float], step: int
    ) -> None:
        """Values to write: a step's each log_every_n_steps, an epoch's at its end."""

    def on_media(self, trainer: RunView, task: Task, media: Media, step: int) -> None:
        """Rank 0: a picture, text, table, sound or histogram to store."""

    def on_exception(self, trainer: RunView, task: Task, exception: BaseException) -> None:
        """The run ends with this error."""

    def on_save_checkpoint(self, trainer: RunView, task: Task, checkpoint: dict[str, Any]) -> None:
        """Add plain values and tensors to a checkpoint."""

    def on_save_checkpoint_end(self, trainer: RunView, task: Task) -> None:
        """After a checkpoint was written or failed."""

    def on_load_checkpoint(self, trainer: RunView, task: Task, checkpoint: dict[str, Any]) -> None:
        """Read them back, after weights are loaded and before `load_state_dict`."""

    def shared_tensors(self) -> dict[str, Any]:
        """Return the tensors of this callback that are equal on all ranks;
        DivergenceGuard compares them.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that survives a restart: plain values and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""


def in_order(callbacks: Iterable[Callback]) -> list[Callback]:
    """Return callbacks in the order in which their hooks are called;
    see `follows_task` for the Task's place among them.
    """
    return sorted(callbacks, key=_place)


def follows_task(callback: Callback) -> bool:
    """Return whether a callback's hooks are called after the Task's."""
    return _place(callback) > 0


def _place(callback: Callback) -> int:
    """Return a callback's place: a checkpoint contains what all others do,
    and a commit what is known of the checkpoint.
    """
    if callback.role in _SAVE:
        return 3 + _SAVE.index(callback.role)
    return 2 if callback.runs_last else 1 if callback.monitors else -int(callback.runs_first)
