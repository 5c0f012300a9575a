"""The plan of a run: builds it as rank 0 of N simulated ranks with the training code and describes
it; trains nothing.

Feeds, contract, schedules and hooks are those of a fit (run/); this file only adds their
description.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from trainkit.api.dispatch import Hooks
from trainkit.api.step_call import has_step
from trainkit.api.task import Task
from trainkit.callbacks import Balance
from trainkit.console import plural
from trainkit.data.feed import MapFeed
from trainkit.data.shares import samples_of
from trainkit.engine.reduce.buckets import find_sparse
from trainkit.extensions.plan.layouts import Layout
from trainkit.extensions.plan.traffic import held_bytes, ring_bytes, split_bytes
from trainkit.extensions.reports.grid import human
from trainkit.run.evaluator import steps_between
from trainkit.run.run import Run

Rows = list[tuple[str, str]]
_WIRE_BYTES = {"none": None, "fp16": 2, "bf16": 2}
_TIMES = {1: "once", 2: "twice"}


@dataclass(frozen=True)
class Sizes:
    """Bytes on each rank, and bytes that a step transfers."""

    weights: int  # parameters and buffers
    gradients: int  # gradients of the parameters trained now
    optimizer: int  # optimizer state after a step
    payload: int  # bytes reduced over ranks in a step
    tensors: int  # number of reduced gradients
    sparse: int = 0  # number of sparse ones among them; they count as if all rows were used
    buffers: int = 0  # a part of `weights`
    averages: int = 0  # weights that a callback averages (callbacks=ema)
    held: int = 0  # of approximate communication: shared weights, momenta, or errors
    gathered: float = 1.0  # of a weight's bytes, those that travel if it is gathered


def batch_rows(run: Run) -> Rows:
    """Return the arithmetic of samples, steps and rates."""
    what = "data rank" if run.engine.ranks.model_size > 1 else "rank"
    rows = list(run.batch_plan.describe(run.rates.user_lrs, run.total_steps, what))
    if text := run.engine.approximation.shown:
        rows.append(("gradients", text))
    feed = run.train_feed
    limits = run.options.limits
    if isinstance(feed, MapFeed):
        plan = feed.plan_of(0)
        rows.append(("data", f"{plan.num_samples:,} samples an epoch"))
        last = plan.samples_in(plan.num_steps - 1)
        if last < plan.global_batch_size:
            idle = sum(
                not plan.microbatches(plan.num_steps - 1, rank) for rank in range(plan.world_size)
            )
            without = f"; {idle} ranks have none of them" if idle else ""
            rows.append(
                (
                    "last step",
                    (
                        f"{last} samples instead of {plan.global_batch_size}, weighted"
                        f" accordingly{without}"
                    ),
                )
            )
        if plan.shares is not None:
            sizes = samples_of(plan.shares, plan.batch_size * plan.world_size, plan.world_size)
            text = (
                f"{max(sizes)} samples on rank {sizes.index(max(sizes))}, {min(sizes)} on rank"
                f" {sizes.index(min(sizes))}"
            )
            rows.append(("microbatches", f"{text}; the largest needs the most memory"))
    if (
        balance := next((c for c in run.callbacks if isinstance(c, Balance)), None)
    ) and run.engine.ranks.world_size > 1:
        look = "epoch" if balance.every_n_steps is None else plural(balance.every_n_steps, "step")
        limit = balance.max_microbatch
        most = (
            "memory is not looked at"
            if limit is None
            else f"microbatches of {limit} samples at most"
        )
        rows.append(("balance", f"split again by measured speed, looked at each {look}; {most}"))
    per_epoch = feed.num_steps_in(0)
    total = run.total_steps
    if per_epoch is not None:
        epochs = f", {limits.max_epochs} epochs" if limits.max_epochs is not None else ""
        rows.append(("steps", f"{per_epoch:,} an epoch{epochs}, {total:,} in all"))
    elif total is not None:
        rows.append(("steps", f"{total:,} in all"))
    if run.evaluator.has_data:
        every = steps_between(run.options.evaluation.val_check_interval, per_epoch)
        epochs_between = run.options.evaluation.check_val_every_n_epoch
        when = (
            f"each {every} steps"
            if every
            else f"at the end of each {nth(epochs_between or 1)}epoch"
        )
        rows.append(("validation", when))
    return rows


def step_rows(run: Run, hooks: Hooks, precision: str = "") -> Rows:
    """Return everything that runs in a step, in order, each with its owner.
    Hooks without an implementation are left out.

    Args:
        precision: that was asked for, if the run is planned in another one.
    """
    contract = run.batch_plan
    sums = f"{run.engine.name}: "
    overlap = (
        "sums over ranks start in the last one" if contract.world_size > 1 else "gradients add up"
    )
    order: list[tuple[str, str | None]] = [
        ("on_train_step_start", None),
        (f"for each microbatch, {contract.accumulate} on a rank", ""),
        ("  on_train_batch_start", None),
        (
            "  training_step",
            f"{type(run.task).__name__}, {precision or run.options.numerics.precision}",
        ),
        ("  on_before_zero_grad of the first", None),
        *[("  optimizer_zero_grad of the first", "Task")]
        * has_step(run.task, Task, "optimizer_zero_grad"),
        ("  on_before_backward", None),
        ("  backward", sums + overlap),
        ("  on_after_backward", None),
        *[("  on_train_batch_end of all but the last", None)] * (contract.accumulate > 1),
        (
            "reduce_gradients",
            sums + ("waits for the sums" if contract.world_size > 1 else "nothing to sum"),
        ),
    ]
    if run.options.numerics.stop_on_nonfinite:
        order.append(("stop if a loss is not finite", "Trainer: one small sum over ranks"))
    if run.options.numerics.precision == "16-mixed":
        order.append(("unscale", "GradScaler"))
    order.append(("on_before_optimizer_step", None))
    if has_step(run.task, Task, "configure_gradient_clipping"):
        order.append(("configure_gradient_clipping", "Task"))
    elif (clip_val := run.options.numerics.gradient_clip_val) is not None:
        order.append(
            (f"clip by {run.options.numerics.gradient_clip_algorithm}", f"Trainer: at {clip_val}")
        )
    order += [("optimizer.step", type(optimizer).__name__) for optimizer in run.optimizers]
    order.append(("on_after_optimizer_step", None))
    by_step = [
        type(config.scheduler).__name__
        for config in run.rates.schedules
        if config.interval == "step"
    ]
    if by_step or contract.warmup_steps:
        order.append(
            (
                "learning rate",
                ", ".join([*(["warm-up"] if contract.warmup_steps else []), *by_step]),
            )
        )
    order.append(
        (
            "on_train_batch_end of the last" if contract.accumulate > 1 else "on_train_batch_end",
            None,
        )
    )
    order += [
        (f"each {run.options.limits.log_every_n_steps} steps: on_metrics", None),
        ("on_train_step_end", None),
    ]
    rows = []
    for what, owner in order:
        if owner is None:
            name = next(word for word in what.split() if word.startswith("on_"))
            owner = ", ".join(hooks.owners(name))
            if not owner:
                continue
        rows.append((what, owner))
    return rows


def measure(run: Run, engine: Mapping[str, Any]) -> Sizes:
    """Return all sizes but activations.
    Takes a step of each optimizer on zeros, which invalidates the weights.

    Args:
        engine: options of the engine, by name.
    """
    every = [*run.task.parameters()]
    trained = [p for p in every if p.requires_grad]
    wire = _WIRE_BYTES[str(engine.get("compression") or "none")]
    payload = sum(p.numel() * (wire or _summed_as(p, run.engine.name)) for p in trained)
    as_dense = bool(engine.get("sparse_as_dense"))
    sparse = set() if as_dense else find_sparse(run.task, run.optimizers)
    narrow = 2 * sum(p.numel() for p in every) / max(1, bytes_of(every))
    for parameter in trained:
        zeros = torch.zeros_like(parameter)
        parameter.grad = zeros.to_sparse(1) if parameter in sparse else zeros
    later = sum(_take_step(optimizer) for optimizer in run.optimizers)
    states = [
        v
        for opt in run.optimizers
        for s in opt.state.values()
        for v in s.values()
        if isinstance(v, Tensor)
    ]
    return Sizes(
        weights=bytes_of([*run.task.parameters(), *run.task.buffers()]),
        gradients=bytes_of(trained),
        optimizer=bytes_of(states) + later,
        payload=payload if run.engine.ranks.world_size > 1 else 0,
        tensors=len(trained),
        sparse=len(sparse),
        buffers=bytes_of([*run.task.buffers()]),
        averages=sum(p.numel() * averaged_width(run, p) for p in every),
        held=held_bytes(run),
        gathered=narrow if engine.get("param_dtype") else 1.0,
    )


def averaged_width(run: Run, parameter: Tensor) -> int:
    """Return the bytes of an element of a parameter in an average of the weights; 0 without one."""
    if not any(callback.role == "weight_average" for callback in run.callbacks):
        return 0
    return max(4, parameter.element_size())


def _take_step(optimizer: Optimizer) -> int:
    """Take a step on the gradients that are there; return the bytes that later ones add."""
    needs = inspect.signature(optimizer.step).parameters.values()
    closure: Any = [lambda: torch.zeros(())] * any(own.default is own.empty for own in needs)
    optimizer.step(*closure)
    if not isinstance(optimizer, LBFGS):
        return 0
    group = optimizer.param_groups[0]  # its only one: steps and changes of gradients, and the last
    return 2 * (int(group["history_size"]) + 1) * bytes_of(group["params"])


def size_rows(
    sizes: Sizes, world_size: int, layout: Layout | None = None, zero: bool = False
) -> Rows:
    """Return the communication of a step and the memory of a rank.

    Args:
        layout: of engine=fsdp, whose ranks split weights, gradients and optimizer state.
        zero: whether DeepSpeed splits them, by its stage.
    """
    if layout is not None and layout.ranks > layout.replicas:
        return _split_rows(sizes, layout)
    if world_size > 1:
        ring = ring_bytes(sizes.payload, world_size)
        most = f" at most ({sizes.sparse} of them send only the used rows)" if sizes.sparse else ""
        sums = (
            f"{sizes.tensors} gradients, {human(sizes.payload)}{most}; a ring sends {human(ring)}"
            " from each rank"
        )
        flags = f"flags for missing gradients, {human(4 * sizes.tensors)}"
    rows = (
        [("summed in a step", f"{sums}; {flags}")]
        if world_size > 1
        else [("summed in a step", "nothing: one rank")]
    )
    total = sizes.weights + sizes.gradients + sizes.optimizer + sizes.averages + sizes.held
    held = f", held for communication {human(sizes.held)}" * bool(sizes.held)
    shown = _parts_of_memory(sizes) + held
    split = ", before DeepSpeed splits them by its stage" * zero
    return [*rows, ("memory of a rank", f"{human(total)}: {shown}{split}; activations not counted")]


def _parts_of_memory(sizes: Sizes) -> str:
    averages = f", average of weights {human(sizes.averages)}" * bool(sizes.averages)
    return (
        f"weights {human(sizes.weights)}, gradients {human(sizes.gradients)}, optimizer"
        f" {human(sizes.optimizer)}{averages}"
    )


def _split_rows(sizes: Sizes, layout: Layout) -> Rows:
    """Return the rows of ranks that split weights, gradients and optimizer state."""
    parts, tensor, stages = layout.ranks // layout.replicas, layout.tensor, layout.pipeline
    weights = sizes.weights - sizes.buffers
    gathered = int(weights * sizes.gathered) // stages
    sent = split_bytes(gathered, sizes.gradients // stages, layout)
    times = _TIMES.get(layout.gathers, f"{layout.gathers} times")
    of_stage = "a stage's " * (stages > 1)
    of_widths = f"; {human(sent // tensor)} of layers split by width, and their activations"
    split = weights + sizes.gradients + sizes.optimizer + sizes.averages
    whole = f"what no plan splits by width, {tensor} times that; " * (tensor > 1)
    buffers = f"buffers {human(sizes.buffers)} and " * bool(sizes.buffers)
    return [
        (
            "sent in a step",
            f"{of_stage}weights gathered {times} and gradients summed in parts, up to"
            f" {human(sent)} a rank{of_widths * (tensor > 1)}",
        ),
        (
            "memory of a rank",
            (
                f"{human(split // parts + sizes.buffers)}: {buffers}a part in {parts} of"
                f" {_parts_of_memory(sizes)}; {whole}gathered blocks and activations not counted"
                " (memory_gb=N counts them)"
            ),
        ),
    ]


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors; one that is there twice counts once."""
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


def _summed_as(parameter: Tensor, engine: str) -> int:
    """Return the bytes of an element on the wire, uncompressed:
    Horovod sends bfloat16 as float32.
    """
    widened = engine == "horovod" and parameter.dtype == torch.bfloat16
    return 4 if widened else parameter.element_size()


def nth(count: int) -> str:
    """Return "2nd ", and "" for 1: each epoch, each 2nd epoch."""
    if count == 1:
        return ""
    ending = (
        "th" if count % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    )
    return f"{count}{ending} "
