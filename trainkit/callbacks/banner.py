"""What a user sees first: engine, ranks, precision, the arithmetic of batch and learning rate, where the files are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rich.table import Table
from rich.text import Text

from trainkit.api.callback import Callback
from trainkit.console import console_of, plural, short
from trainkit.data.feed import MapFeed, StreamFeed

if TYPE_CHECKING:
    from trainkit.api.task import Task
    from trainkit.trainer import Trainer


class Banner(Callback):
    """Prints a few lines on rank 0 when a fit starts."""

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        """Print."""
        if not trainer.is_global_zero:
            return
        engine, session, console = trainer.engine, trainer.session, console_of()
        if session.goes_on_from_memory:
            console.print(_going_on(trainer), soft_wrap=True)
            return
        ranks = plural(engine.ranks.world_size, "rank")
        told = "".join(f", {option} {value}" for option, value in engine.shown_options.items())
        rows = [("engine", f"{engine.name}, {ranks}, {_device(engine.device)}, precision {session.settings.precision}{told}")]
        trained = sum(p.numel() for p in task.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in task.parameters()) - trained
        rows.append(("model", f"{type(task).__name__}, {trained:,} parameters{f' and {frozen:,} frozen' * bool(frozen)}"))
        if isinstance(session.run.feed, StreamFeed) and engine.ranks.world_size > 1:
            rows.append(("data", "an iterable: each rank reads its own and trainkit does not shard it"))
        rows.append(("optimizer", ", ".join(map(_kind, session.run.optimizers))))
        rows += trainer.contract.describe(session.user_lrs)
        rows.append(("run", _plan(trainer)))
        if session.resumed_from is not None:
            place = f"epoch {trainer.current_epoch}, step {trainer.global_step}"
            rows.append(("resumed", f"{short(session.resumed_from)} at {place}"))
        rows.append(("files", short(trainer.run_dir)))
        table = Table.grid(padding=(0, 2))
        for name, text in rows:
            table.add_row(Text(name, style="bold"), Text(text, overflow="fold"))
        console.print(table)


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Name an optimizer, and which of torch's implementations makes its update where it is not the plain loop."""
    chosen = [name for name in ("fused", "foreach") if any(group.get(name) for group in optimizer.param_groups)]
    return " ".join([*chosen, type(optimizer).__name__])


def _device(device: torch.device) -> str:
    """Name a rank's device; on the CPU with its threads, which the engine shares out among the ranks of a host."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"{device} with {plural(threads, 'thread')} a rank"


def _going_on(trainer: Trainer) -> str:
    """Say, in an elastic run, what goes on with how many ranks."""
    ranks, feed = trainer.world_size, trainer.session.run.feed
    who = f"{ranks} ranks go" if ranks > 1 else "1 rank goes"
    text = f"{who} on from step {trainer.global_step} (epoch {trainer.current_epoch + 1}), kept in memory"
    if isinstance(feed, MapFeed) and ranks != trainer.contract.world_size:
        shares = feed.plan_of(trainer.current_epoch).microbatches(0, 0)
        sizes = ", ".join(map(str, sorted({len(share) for share in shares}, reverse=True)))
        total = trainer.contract.at(trainer.current_epoch).global_batch_size
        parts = f"{len(shares)} microbatches" if len(shares) > 1 else "1 microbatch"
        text += f"; a step stays {total} samples, in {parts} of {sizes} on each rank"
    return text


def _plan(trainer: Trainer) -> str:
    """Say how long the run is."""
    per_epoch, total = trainer.session.num_training_steps, trainer.session.total_steps
    epochs = "" if trainer.max_epochs is None else plural(trainer.max_epochs, "epoch")
    steps = "" if per_epoch is None else f" of {plural(per_epoch, 'step')}"
    end = "" if total is None else f"{', ' if epochs else ''}{plural(total, 'step')} in all"
    return f"{epochs}{steps if epochs else ''}{end}"
