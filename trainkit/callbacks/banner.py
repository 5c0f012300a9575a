"""Banner: the lines printed at the start:
engine, ranks, precision, arithmetic of batch and learning rate, output folder.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.optim.lr_scheduler import CosineAnnealingLR

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.callbacks.checkpoint import ModelCheckpoint
from trainkit.callbacks.early_stopping import EarlyStopping
from trainkit.console import are_printed, console_of, info, plural, short, show_table
from trainkit.data.feed import MapFeed, StreamFeed
from trainkit.device.accelerator import has_streams, is_accelerator, name_of
from trainkit.engine.pieces import numel_of
from trainkit.launch.terminal import columns_of_launcher

_NOT_PINNED = (
    "the host waits while its batches are copied; with pin_memory=True in the DataLoader they are"
    " copied beside the computation"
)
_RESTING = (
    ", as before the fit: no dropout, and batch norm by its running averages; .train() changes it"
)
_TENSOR_CORES = (
    "matrices of float32 are multiplied without this GPU's tensor cores: trainer.precision=bf16-mixed"
    " uses them, or trainer.float32_matmul_precision=high (TF32)"
)


class Banner(Callback):
    """Prints a few lines on rank 0 when a fit starts.

    Args:
        is_whole: False prints a line if the rates are not those that the script has set, since
            another framework would leave them, and one if modules are in eval mode.
    """

    may_differ = True

    def __init__(self, is_whole: bool = True) -> None:
        self._is_whole = is_whole

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        """Print the banner, or one line if an elastic run resumes from memory."""
        if not trainer.is_global_zero:
            return
        if not self._is_whole:
            _say_least(trainer, task)
            return
        engine = trainer.engine
        checkpoints = trainer.checkpoints
        if checkpoints.resumed_from_memory:
            show_table(_describe_resume(trainer), soft_wrap=True)
            return
        ranks, groups = plural(engine.ranks.world_size, "rank"), engine.ranks.groups
        if groups:
            ranks += f": {groups}"
        extra = "".join(f", {option} {value}" for option, value in engine.shown_options.items())
        note = f" ({trainer.precision.note})" if trainer.precision.note else ""
        rows = [
            (
                "engine",
                (
                    f"{engine.name}, {ranks}, {_device(engine.device)}, precision"
                    f" {trainer.options.numerics.precision}{note}{extra}"
                ),
            )
        ]
        trained = sum(numel_of(p) for p in task.parameters() if p.requires_grad)
        frozen = sum(numel_of(p) for p in task.parameters()) - trained
        rows.append(
            (
                "model",
                (
                    f"{type(task).__name__}, {trained:,}"
                    f" parameters{f' and {frozen:,} frozen' * bool(frozen)}"
                ),
            )
        )
        rows += [("advice", text) for text in _resting(task)]
        if isinstance(trainer.train_feed, StreamFeed) and engine.ranks.world_size > 1:
            rows.append(("data", f"a stream: {trainer.train_feed.stream.reading}"))
        rows.append(("optimizer", ", ".join(map(_kind, trainer.optimizers))))
        rows += trainer.batch_plan.describe(
            trainer.rates.user_lrs, trainer.total_steps, "data rank" if groups else "rank"
        )
        names = {type(optimizer).__name__ for optimizer in trainer.optimizers}
        if advice := trainer.batch_plan.not_for_adaptive(names):
            rows.append(("advice", advice))
        if lacks_tensor_cores(trainer):
            rows.append(("advice", _TENSOR_CORES))
        if waits_for_copies(trainer):
            rows.append(("advice", _NOT_PINNED))
        rows += [("advice", text) for text in _unseen(trainer)]
        if approximation := engine.approximation.shown:
            rows.append(("gradients", approximation))
        rows.append(("run", _plan(trainer)))
        rows += [("schedule", text) for text in _rising(trainer)]
        rows += [("advice", text) for text in _unreached(trainer)]
        if counted := _counted(trainer):
            rows.append(("counted", counted))
        if checkpoints.resumed_from is not None:
            place = f"epoch {trainer.current_epoch}, step {trainer.global_step}"
            rows.append(("resumed", f"{short(checkpoints.resumed_from)} at {place}"))
        rows.append(("files", short(trainer.run_dir)))
        table = Table.grid(padding=(0, 2))
        for name, text in rows:
            table.add_row(Text(name, style="bold"), Text(text, overflow="fold"))
        console = _console()
        with console.capture() as drawn:
            console.print(table)
        lines = drawn.get().splitlines()
        info("\n".join(line.rstrip() for line in lines))  # rich fills each line up to the longest


def _say_least(trainer: RunView, task: Task) -> None:
    """Print the rate, if it is not the script's, and modules in eval mode, if there are any."""
    if trainer.checkpoints.resumed_from_memory:
        return
    plan = trainer.batch_plan
    if plan.lr_factor != 1.0:
        rate = dict(plan.describe(trainer.rates.user_lrs))["learning rate"]
        trainer.say(f"learning rate  {rate}")
    for text in _resting(task):
        trainer.say(f"advice         {text}")


def _resting(task: Task) -> list[str]:
    """Say how many modules are in eval mode, and what follows from it."""
    count = sum(not module.training for module in task.modules())
    return [f"{plural(count, 'module')} in eval mode{_RESTING}"] if count else []


def _console() -> Console:
    """Return a console as wide as the terminal, also where a launcher prints this rank's lines."""
    if not are_printed():
        return console_of(io.StringIO())
    columns = columns_of_launcher()
    return console_of() if columns is None else console_of(width=columns)


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Return an optimizer's class, preceded by its torch implementation
    (fused, foreach) unless that is the plain loop.
    """
    chosen = [
        name
        for name in ("fused", "foreach")
        if any(group.get(name) for group in optimizer.param_groups)
    ]
    return " ".join([*chosen, type(optimizer).__name__])


def lacks_tensor_cores(trainer: RunView) -> bool:
    """Return whether a GPU that has tensor cores multiplies matrices without them."""
    device, numerics = trainer.engine.device, trainer.options.numerics
    if device.type != "cuda" or numerics.precision != "32-true":
        return False
    rounded = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return not rounded and torch.cuda.get_device_capability(device) >= (8, 0)


def waits_for_copies(trainer: RunView) -> bool:
    """Return whether a loader's batches are copied to an accelerator from memory that is not
    pinned. DataLoader's default looks like a user's choice, so it is not changed.
    """
    feed = trainer.train_feed
    if not isinstance(feed, MapFeed) or not has_streams(trainer.engine.device):
        return False
    return not feed.source.options.get("pin_memory")


def _device(device: torch.device) -> str:
    """Name a rank's device; on the CPU with its threads,
    which the engine divides among the ranks of a host.
    """
    if is_accelerator(device):
        return f"{device} ({name_of(device)})"
    threads = torch.get_num_threads()
    return f"{device} with {plural(threads, 'thread')} a rank"


def _describe_resume(trainer: RunView) -> str:
    ranks = trainer.world_size
    feed = trainer.train_feed
    resumed = f"{ranks} ranks resume" if ranks > 1 else "1 rank resumes"
    text = (
        f"{resumed} from memory at step {trainer.global_step} (epoch {trainer.current_epoch + 1})"
    )
    if isinstance(feed, MapFeed) and ranks != trainer.batch_plan.world_size:
        shares = feed.plan_of(trainer.current_epoch).microbatches(0, 0)
        sizes = ", ".join(map(str, sorted({len(share) for share in shares}, reverse=True)))
        total = trainer.batch_plan.at(trainer.current_epoch).global_batch_size
        parts = f"{len(shares)} microbatches" if len(shares) > 1 else "1 microbatch"
        text += f"; a step stays {total} samples, in {parts} of {sizes} on each rank"
    return text


def _plan(trainer: RunView) -> str:
    per_epoch, total = trainer.train_feed.num_steps_in(trainer.current_epoch), trainer.total_steps
    max_epochs = trainer.options.limits.max_epochs
    epochs = "" if max_epochs is None else plural(max_epochs, "epoch")
    steps = "" if per_epoch is None else f" of {plural(per_epoch, 'step')}"
    ends = [type(callback).__name__ for callback in trainer.callbacks if callback.ends_run]
    limit = f"until {' or '.join(ends)} ends the run" if ends else "without a limit on their number"
    if total is None:
        plan = f"{epochs}{steps}" if epochs else f"epochs{steps}, {limit}"
    elif epochs and per_epoch and total < per_epoch * (max_epochs or 0):
        plan = f"{plural(total, 'step')} in all, before the end of {epochs}{steps}"
    else:
        plan = f"{epochs}{f'{steps}, ' if epochs else ''}{plural(total, 'step')} in all"
    return plan + _left_out(trainer.train_feed, trainer.current_epoch) + _never_validated(trainer)


def _never_validated(trainer: RunView) -> str:
    """Say that a run with validation data ends before its first validation."""
    every = trainer.options.evaluation.check_val_every_n_epoch
    last = trainer.options.limits.max_epochs
    if every is None or last is None or every <= last or not trainer.evaluator.has_data:
        return ""
    return f"; no validation, since check_val_every_n_epoch is {every}"


def _unseen(trainer: RunView) -> list[str]:
    """Say what callbacks monitor of a validation that a run without validation data has not."""
    monitored = {
        callback.monitor: type(callback).__name__
        for callback in trainer.callbacks
        if isinstance(callback, (EarlyStopping, ModelCheckpoint))
        and (callback.monitor or "").startswith("val")
    }
    return [
        f"{name} monitors {metric}, and there is no validation data: the first epoch ends with an"
        " error, unless the Task logs it in training"
        for metric, name in monitored.items()
        if not trainer.evaluator.has_data
    ]


def _left_out(feed: Any, epoch: int) -> str:
    """Say how many samples an epoch leaves out since its last step is not full (drop_last=True)."""
    plan = feed.plan_of(epoch) if isinstance(feed, MapFeed) else None
    if plan is None or not plan.drop_last:
        return ""
    left = plan.num_samples - plan.num_steps * plan.global_batch_size
    return (
        f"; drop_last=True leaves out {left:,} of {plan.num_samples:,} samples of an epoch"
        if left
        else ""
    )


def _rising(trainer: RunView) -> list[str]:
    """Say which cosines go up again, since the run is longer than they are."""
    lines = []
    for config in trainer.rates.schedules:
        length = {"epoch": trainer.options.limits.max_epochs, "step": trainer.total_steps}.get(
            config.interval
        )
        if not isinstance(config.scheduler, CosineAnnealingLR) or length is None:
            continue
        lowest = config.scheduler.T_max
        moves = length // config.frequency
        if moves > lowest:
            reached = plural(lowest * config.frequency, config.interval)
            lines.append(
                f"CosineAnnealingLR has T_max={lowest}: after {reached} of {length} the rate rises"
                " again"
            )
    return lines


def _unreached(trainer: RunView) -> list[str]:
    """Say which settings of steps lie beyond the run's last one."""
    saves = [
        one.every_n_train_steps for one in trainer.callbacks if isinstance(one, ModelCheckpoint)
    ]
    steps = [("ModelCheckpoint.every_n_train_steps", every) for every in saves if every]
    if trainer.task.automatic_optimization:  # by hand an epoch has any number of steps
        steps.append(("max_steps", trainer.options.limits.max_steps or 0))
    if (exact := trainer.options.communication.start_after_steps) > 0:
        steps.append(("communication.start_after_steps", exact + 1))
    return [
        f"{name} is not reached: the run has {plural(total, 'step')}"
        for name, first in steps
        if (total := trainer.total_steps) and first > total
    ]


def _counted(trainer: RunView) -> str:
    """Say what counts steps where Lightning counts batches, if that is a difference."""
    if trainer.batch_plan.accumulate == 1 or not trainer.task.automatic_optimization:
        return ""
    interval = trainer.options.evaluation.val_check_interval
    by_step = any(config.interval == "step" for config in trainer.rates.schedules)
    names = ["val_check_interval"] * (isinstance(interval, int) and trainer.evaluator.has_data) + [
        "schedulers"
    ] * by_step
    return (
        f"{' and '.join(names)} by steps, each of {trainer.batch_plan.accumulate} batches of a rank"
        if names
        else ""
    )
