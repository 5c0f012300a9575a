"""Task: the model and how it is trained;
the counterpart of LightningModule, with the same names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, device, nn

from trainkit.api.datamodule import DataHooks
from trainkit.api.fixed_hooks import FixedHooks
from trainkit.api.from_checkpoint import build_from
from trainkit.api.hyperparameters import Configured
from trainkit.api.in_run import InRun
from trainkit.api.lightning_names import LOG_ARGUMENTS, LOG_IGNORES, of_another_class
from trainkit.api.manual import ManualOptimization
from trainkit.api.media_logging import LogsMedia
from trainkit.api.step_call import call_step, has_step
from trainkit.api.task_hooks import TaskHooks
from trainkit.arguments import illegal, unknown
from trainkit.device.shards import is_spread, whole_of
from trainkit.engine.deferred.values import Deferred
from trainkit.errors import TaskError
from trainkit.metrics.log import MetricLog, Reduction, reduction_of
from trainkit.metrics.media import Media
from trainkit.metrics.objects import is_collection, is_metric, latest_of

_NO_STEPS = "validation and test log no steps, only the value over all samples."
_OF_STEP = (
    "the value of a step is rank 0's; that of the epoch, with on_epoch=True, is over all ranks."
)
_NOTHING = (
    "...) would log neither a step's value nor an epoch's, so this has no effect: an evaluation logs"
    " no steps, and training no epoch's value unless on_epoch=True. Leave on_step and on_epoch out."
)

_Task = TypeVar("_Task", bound="Task")


class LogTarget(NamedTuple):
    """Target of `log`, set by the loop:
    the table, this batch's samples, and the defaults of the stage.
    """

    table: MetricLog
    num_samples: int
    on_step: bool
    on_epoch: bool


class Task(
    FixedHooks, TaskHooks, DataHooks, Configured, InRun, LogsMedia, ManualOptimization, nn.Module
):
    """Subclass it, write `training_step` and `configure_optimizers`, and pass it to `Trainer.fit`.

    All methods below may be overridden, and those of DataHooks, for data without a DataModule.
    Never call `.cuda()`, wrap the model, scale the learning rate, or reduce over ranks here: the
    Trainer does.
    """

    # The mean number of tokens of a sample, of a Task on text: progress then shows tokens/s. May be
    # a property.
    tokens_per_sample: float | None = None
    # What a batch is, as text; data and a task that declare different ones are refused.
    # A dict of argument -> text is for a batch that depends on which argument is given ("": none).
    batch_shape: str | dict[str, str] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._log_target: LogTarget | None = None
        self._before_step: Callable[[], None] | None = None  # see run/compile.py
        self._has_model = False
        self._first_weights: Deferred | None = None  # of layers that are without memory yet
        self._layers_of: Any = None  # the callback that has replaced layers; see api/layers.py

    # -- to write -------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | Mapping[str, Any]:
        """Return the mean loss over the batch's samples, or a dict with "loss".

        Args:
            batch: one microbatch of this rank, on its device.
            batch_idx: its number in this epoch on this rank, from 0.

        Returns:
            A scalar with grad. A dict may hold "num_samples" too (a number or a scalar tensor): the
            batch's weight among the step's batches, if it is not the number of samples (tokens, for
            example).
        """
        raise TaskError(_missing(self, "training_step", "return the loss"))

    def configure_model(self) -> None:
        """Make the layers here, in place of `__init__`, if no single rank can hold them. Called
        once, after `setup`.

        Under `engine=fsdp` they take no memory until they are split: then the values that this
        method computes are computed one weight after the other, and each rank keeps its part. They
        are the same numbers as with any other engine.
        """

    def batch_weight(self, batch: Any) -> Any:
        """Return the weight of a batch's mean loss in its step, if it is not the number of samples:
        its tokens, for example.

        As `return (batch["labels"] != -100).sum()`. A number or a scalar tensor; a "num_samples"
        that `training_step` returns takes its place.
        """
        return None

    def translate_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a file by this Task's names and in its shapes; called before
        `init_weights` are loaded.

        As for weights of another library, with other names or transposed matrices. Weights that
        have this Task's names already must come back as they are: those of its own checkpoints are
        passed too. By default all are returned unchanged.
        """
        return weights

    def compare_config(self, config: Mapping[str, Any]) -> list[str]:
        """Return what makes the weights of a folder compute something else here than where they
        come from, though names and shapes are the same; called before `init_weights` are loaded.

        As the number of attention heads. Each line names both values, and what to set.

        Args:
            config: the content of the folder's config.json, as transformers writes it. Without such
                a file nothing is compared.
        """
        return []

    def parallelize(self, mesh: Any) -> Mapping[str, Any] | None:
        """Return which layers are split by width over the ranks of a tensor group (engine=fsdp
        engine.tensor=2).

        Called once, on all ranks, with rank 0's weights, before weights are sharded and optimizers
        are made. As `return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}`: names of
        layers of this Task, or patterns of names. A "colwise" layer has a part of its outputs on
        each rank, a "rowwise" one takes these as its inputs, and sums. Between the two, a width is
        that of one rank's part: write `.view(B, T, -1, 64)` for heads, not their number.

        Args:
            mesh: the DeviceMesh of this rank's group, of one dimension; `mesh.size()` ranks share
                each layer.

        Returns:
            The plan (a value may be a ParallelStyle of torch.distributed.tensor.parallel too), or
            None if `parallelize_module` was called here.
        """
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Call `self.log(name, value)` with the batch's mean; the epoch's value is exact over all
        samples and ranks.

        With several loaders, take a third argument `dataloader_idx`; names then get the suffix
        "/dataloader_idx_N".
        """
        raise TaskError(_missing(self, "validation_step", "log values"))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Like `validation_step`, for `test`. By default it is `validation_step`."""
        return call_step(self, "validation_step", batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return predictions, the batch's samples along the first dimension.
        By default `self(inputs)`.
        """
        return self(batch[0] if isinstance(batch, (list, tuple)) else batch)

    def configure_optimizers(self) -> Any:
        """Return an optimizer, or any of Lightning's forms: a list, (optimizers, schedulers), or
        {"optimizer": ..., "lr_scheduler": scheduler or {"scheduler", "interval", "frequency",
        "monitor"}}.
        """
        raise TaskError(
            _missing(
                self,
                "configure_optimizers",
                "return an optimizer, as torch.optim.SGD(self.parameters(), lr=0.1)",
            )
        )

    def _make_model(self) -> None:
        if not self._has_model:
            self._has_model = True
            self.configure_model()

    def _log_to(self, target: LogTarget | None) -> None:
        # nn.Module.__setattr__ would take many times as long, each batch
        self.__dict__["_log_target"] = target

    # -- to call ----------------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Reduction | Callable[..., Any] = "mean",
        *,
        batch_size: int | None = None,
        sync_dist: bool = False,
        rank_zero_only: bool = False,
        add_dataloader_idx: bool = True,
        **other: Any,
    ) -> None:
        """Log a value. In a step of a batch the epoch's value is exact over all samples, and
        nothing waits for the device.

        Args:
            name: as "train/loss" or "val/acc".
            value: a number, or a dict, vector or matrix of numbers, logged as `name/key`, `name/0`,
                `name/0/1`. In a step: the mean over this batch (or a sum, minimum or maximum, with
                `reduce_fx`); or a torchmetrics object or collection that was called or updated with
                the batch: combined over all ranks at the epoch's end, and reset. In a hook of an
                epoch or of the run: the value as it is, or several by `reduce_fx`. A DTensor is
                gathered: log it on all ranks.
            prog_bar: show it in the progress bar.
            logger: false keeps the value from the loggers; callbacks and the progress bar have it.
            on_step: log this rank's value of the step, each `log_every_n_steps`; an evaluation has
                none. Default: in training.
            on_epoch: log the epoch's value, exact over all samples of all ranks. Default: in
                evaluation only.
            reduce_fx: "mean" (weighted by samples), "sum", "min" or "max" over the epoch, or
                torch's function of that name.
            batch_size: the weight of this value, if it is not the number of samples of the batch.
            sync_dist: in a hook: combine the ranks' values by `reduce_fx`; otherwise rank 0's
                holds. A step's value is rank 0's in any case, as a line says.
            rank_zero_only: leave out the other ranks' values. A hook's value is rank 0's in any
                case.
            add_dataloader_idx: false logs the values of several validation loaders without their
                suffix.
            other: none; the error for another argument names the replacement.

        Raises:
            TaskError: other arguments, or a value that is not made of numbers; or no Trainer runs
                this Task.
        """
        _check_others(name, other)
        if isinstance(value, Tensor) and is_spread(value):
            value = whole_of(value)  # as the norm that torch's clip_grad_norm_ returns under FSDP2
        target = self._log_target
        has_parts = isinstance(value, Mapping) or is_collection(value)
        if logger is False and (target is None or not has_parts):
            suffix = target.table.suffix if target and add_dataloader_idx else ""
            self.trainer.hooks.log.hide(self.trainer.state.stage, name, value, suffix)
        reduction = reduction_of(reduce_fx)
        if target is None:
            log = self.trainer.hooks.log
            weight = 1.0 if batch_size is None else batch_size
            log.add(name, value, reduction, sync_dist, prog_bar, weight)
            if on_step or on_epoch is False:
                log.ask_for_steps(name)
            return
        if has_parts:
            for key, part in value.items():
                how = (prog_bar, logger, on_step, on_epoch, reduction)
                more: dict[str, Any] = {"batch_size": batch_size, "sync_dist": sync_dist}
                more |= {"rank_zero_only": rank_zero_only}
                more |= {"add_dataloader_idx": add_dataloader_idx}
                self.log(f"{name}/{key}", part, *how, **more)
            return
        value = latest_of(value)
        if is_metric(value):  # an epoch's value by default
            on_step = bool(on_step)
            on_epoch = True if on_epoch is None else on_epoch
        elif rank_zero_only and not self.trainer.is_global_zero:
            return
        if on_step and target.on_epoch and not target.on_step:
            self.trainer.hooks.log.say_of(name, "on_step", _NO_STEPS, self.trainer.say)
        weight = target.num_samples if batch_size is None else batch_size
        on_step = target.on_step if on_step is None else on_step
        on_epoch = target.on_epoch if on_epoch is None else on_epoch
        if on_step and sync_dist and target.on_step and self.trainer.world_size > 1:
            self.trainer.hooks.log.say_of(name, "sync_dist", _OF_STEP, self.trainer.say)
        if not on_epoch and (target.on_epoch or not on_step):
            raise TaskError(f"log('{name}', {_NOTHING}")
        options: dict[str, Any] = {"on_step": on_step, "on_epoch": on_epoch, "prog_bar": prog_bar}
        options |= {"reduction": reduction, "has_suffix": add_dataloader_idx}
        target.table.add(name, value, weight=weight, **options)

    def log_dict(self, values: Mapping[str, Any], **options: Any) -> None:
        """Log several values, or a torchmetrics.MetricCollection, with the same options."""
        for name, value in values.items():
            self.log(name, value, **options)

    def _log_media(self, make: Callable[[], Media]) -> None:
        self.trainer.hooks.log.show(make)

    def freeze(self) -> None:
        """Stop training all weights, and switch to eval mode."""
        self.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        """Train all weights, and switch to train mode."""
        self.requires_grad_(True)
        self.train()

    @classmethod
    def load_from_checkpoint(
        cls: type[_Task],
        checkpoint_path: str | Path,
        map_location: str | device | None = None,
        *,
        strict: bool = True,
        **arguments: Any,
    ) -> _Task:
        """Return a Task with a checkpoint's weights.

        Args:
            checkpoint_path: a checkpoint's folder (as runs/mine/checkpoints/best) or URL, or a file
                of weights.
            map_location: the Task's device. Default: the CPU.
            strict: whether all weights must match.
            arguments: of `__init__`, in place of those that `save_hyperparameters` saved; needed
                for what is no plain value.

        Raises:
            CheckpointError: it cannot be read or does not fit, or arguments are missing.
            TaskError: there is no such argument, or map_location is no device.
        """
        if not isinstance(map_location, (str, device, type(None))):
            raise TaskError(illegal("map_location", map_location, "a device, as 'cpu' or 'cuda:1'"))
        return build_from(cls, str(checkpoint_path), strict, arguments).to(map_location or "cpu")


def _check_others(name: str, other: Mapping[str, Any]) -> None:
    for key in other:
        if key not in LOG_IGNORES:
            known = [*inspect.signature(Task.log).parameters][1:-1]
            raise TaskError(unknown(f"log('{name}', ...): {key}", key, known, LOG_ARGUMENTS))


def _missing(task: Task, method: str, what: str) -> str:
    return f"{type(task).__name__} has no {method}(). Define it and {what}."


def check_overrides(task: object, methods: tuple[str, ...]) -> Task:
    """Return the task after checking that it is a Task and defines the methods.

    Raises:
        TaskError: it is none, or a method is missing.
    """
    if not isinstance(task, Task):
        raise TaskError(of_another_class("The task is", task, "Task"))
    if not hasattr(task, "_modules"):
        raise TaskError(f"{type(task).__name__}.__init__ does not call super().__init__().")
    for method in methods:
        if not has_step(task, Task, method):
            near = [
                n for n in vars(type(task)) if n.replace("_", "").lower() == method.replace("_", "")
            ]
            hint = f" (it has {near[0]}(), which is spelt differently)" if near else ""
            what = {
                "training_step": "return the loss",
                "configure_optimizers": "return an optimizer",
            }
            raise TaskError(_missing(task, method, what.get(method, "log values")) + hint)
    return task


def loss_of(outputs: Any, task: Task) -> Tensor:
    """Return the loss from `training_step`'s result, as a scalar.

    Raises:
        TaskError: there is none, it is not one number, or it has no grad.
    """
    loss = outputs
    if not isinstance(outputs, Tensor) and isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.reshape(()) if loss.dim() else loss
    raise TaskError(f"{type(task).__name__}.training_step returned {_not_a_loss(outputs, loss)}")


def _not_a_loss(outputs: Any, loss: Any) -> str:
    """Say what a step returned if that cannot be a loss, and what to return in its place."""
    if not isinstance(loss, Tensor):
        kind = "a dict without 'loss'" if isinstance(outputs, Mapping) else type(outputs).__name__
        return f"{kind}; it must return the loss (a scalar tensor), or a dict with 'loss'."
    if loss.numel() != 1:
        return f"a loss of shape {list(loss.shape)}; it must be one number. Return its mean()."
    return (
        "a loss without grad: it does not depend on trained weights, or was made under"
        " torch.no_grad(), by .item(), .detach() or .data. Return the tensor that the model's"
        " output leads to."
    )
