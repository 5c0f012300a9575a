"""The plan of a run: builds it as rank 0 of N simulated ranks with the training code and describes
it; trains nothing.

Feeds, contract, schedules and hooks are those of a fit (run/); this file only adds their
description.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainkit.api.callback import Callback
from trainkit.api.dispatch import Hooks
from trainkit.api.step_call import has_step
from trainkit.api.task import Task
from trainkit.callbacks import Balance, Elastic, ModelCheckpoint
from trainkit.console import plural
from trainkit.data.feed import MapFeed
from trainkit.data.shares import samples_of
from trainkit.engine.reduce.buckets import find_sparse
from trainkit.extensions.reports.grid import human
from trainkit.run.evaluator import steps_between
from trainkit.run.run import Run

Rows = list[tuple[str, str]]
_WIRE_BYTES = {"none": None, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Sizes:
    """Bytes on each rank, and bytes that a step transfers."""

    weights: int  # parameters and buffers
    gradients: int  # gradients of the parameters trained now
    optimizer: int  # optimizer state after a step
    payload: int  # bytes reduced over ranks in a step
    tensors: int  # number of reduced gradients
    sparse: int = 0  # number of sparse ones among them; they count as if all rows were used


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
            else f"at the end of each {_th(epochs_between or 1)}epoch"
        )
        rows.append(("validation", when))
    return rows


def step_rows(run: Run, hooks: Hooks) -> Rows:
    """Return everything that runs in a step, in order, each with its owner.
    Hooks without an implementation are left out.
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
        ("  training_step", f"{type(run.task).__name__}, {run.options.numerics.precision}"),
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


def measure(run: Run, compression: str) -> Sizes:
    """Return all sizes but activations.
    Takes a step of each optimizer on zeros, which invalidates the weights.
    """
    trained = [p for p in run.task.parameters() if p.requires_grad]
    wire = _WIRE_BYTES[compression]
    payload = sum(p.numel() * (wire or _summed_as(p, run.engine.name)) for p in trained)
    sparse = find_sparse(run.task, run.optimizers)
    for parameter in trained:
        zeros = torch.zeros_like(parameter)
        parameter.grad = zeros.to_sparse(1) if parameter in sparse else zeros
    for optimizer in run.optimizers:
        optimizer.step()
    states = [
        v
        for opt in run.optimizers
        for s in opt.state.values()
        for v in s.values()
        if isinstance(v, Tensor)
    ]
    return Sizes(
        weights=_bytes([*run.task.parameters(), *run.task.buffers()]),
        gradients=_bytes(trained),
        optimizer=_bytes(states),
        payload=payload if run.engine.ranks.world_size > 1 else 0,
        tensors=len(trained),
        sparse=len(sparse),
    )


def size_rows(
    sizes: Sizes,
    world_size: int,
    parts: int = 1,
    zero: bool = False,
    tensor: int = 1,
    stages: int = 1,
) -> Rows:
    """Return the communication of a step and the memory of a rank.

    Args:
        parts: ranks that split weights, gradients and optimizer state (engine=fsdp).
        zero: whether DeepSpeed splits them, by its stage.
        tensor: ranks that share layers by width, among `parts`.
        stages: of a pipeline, among `parts`.
    """
    if parts > 1:
        whole = f"what no plan splits by width, {tensor} times that; " * (tensor > 1)
        weights = sizes.weights // parts
        state = sizes.gradients // parts + sizes.optimizer // parts
        return [
            (
                "sent in a step",
                "a stage's "
                * (stages > 1)
                + "weights gathered twice and gradients summed in parts, up to"
                f" {human(3 * sizes.weights // stages)} a rank"
                + f"; {human(3 * sizes.weights // tensor // stages)} of layers split by width, and their"
                " activations" * (tensor > 1),
            ),
            (
                "memory of a rank",
                (
                    f"{human(weights + state)}: a part in {parts} of weights"
                    f" {human(sizes.weights)}, gradients {human(sizes.gradients)}, optimizer"
                    f" {human(sizes.optimizer)}; {whole}gathered blocks and activations not counted"
                    " (memory_gb=N counts them)"
                ),
            ),
        ]
    if world_size > 1:
        ring = 2 * (world_size - 1) / world_size * sizes.payload  # Patarasuk & Yuan 2009
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
    total = sizes.weights + sizes.gradients + sizes.optimizer
    shown = (
        f"weights {human(sizes.weights)}, gradients {human(sizes.gradients)}, optimizer"
        f" {human(sizes.optimizer)}"
    )
    split = ", before DeepSpeed splits them by its stage" * zero
    return [*rows, ("memory of a rank", f"{human(total)}: {shown}{split}; activations not counted")]


def checkpoint_rows(run: Run, callbacks: Sequence[Callback], sizes: Sizes) -> Rows:
    """Return when checkpoints are written, their size, and how many are retained."""
    rows: Rows = []
    total = run.total_steps
    epochs = run.options.limits.max_epochs
    for keeper in (c for c in callbacks if isinstance(c, ModelCheckpoint)):
        when = []
        if keeper.every_n_epochs:
            count = "" if epochs is None else f" ({epochs // keeper.every_n_epochs} in all)"
            when.append(f"each {_th(keeper.every_n_epochs)}epoch{count}")
        if keeper.every_n_train_steps:
            count = "" if total is None else f" ({total // keeper.every_n_train_steps} in all)"
            when.append(f"each {keeper.every_n_train_steps} steps{count}")
        adapters = run.task._layers_of is not None  # they alone are saved
        weights = _bytes([*run.task.state_dict().values()]) if adapters else sizes.weights
        size = weights + (0 if keeper.save_weights_only else sizes.optimizer)
        retained = "all retained" if keeper.save_top_k == -1 else f"{keeper.save_top_k} retained"
        by = f" by {keeper.monitor} ({keeper.mode})" if keeper.monitor else ""
        rows.append(
            (
                "checkpoints",
                f"{', '.join([*when, 'at the end'])}: {human(size)} each, {retained}{by}",
            )
        )
    return rows or [("checkpoints", "none")]


def copy_rows(callbacks: Sequence[Callback], sizes: Sizes, engine: str, parts: int) -> Rows:
    """Return what copies in other hosts' memory cost (callbacks.elastic.copies).

    Args:
        engine: its name.
        parts: ranks that split weights and optimizer state.
    """
    elastic = next((c for c in callbacks if isinstance(c, Elastic) and c.copies), None)
    if elastic is None:
        return []
    if engine != "fsdp":
        return [("copies", f"refused: each rank of engine={engine} holds all state")]
    every, copies = elastic.commit_every_n_steps, elastic.copies
    part = (sizes.weights + sizes.optimizer) // parts
    sent = part * copies
    held = part * (1 + copies)
    return [
        (
            "copies",
            (
                f"each {plural(every, 'step')} {human(sent)} of a rank to"
                f" {'another host' if copies == 1 else f'{copies} other hosts'},"
                f" {human(sent // every)} a step on average"
            ),
        ),
        (
            "memory of a host",
            (
                f"{human(part + held)} for each of its ranks: {human(part)} to copy from, and"
                f" {human(held)} held; {human(part + 2 * held)} while a copy is under way"
            ),
        ),
    ]


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


def _summed_as(parameter: Tensor, engine: str) -> int:
    """Return the bytes of an element on the wire, uncompressed:
    Horovod sends bfloat16 as float32.
    """
    widened = engine == "horovod" and parameter.dtype == torch.bfloat16
    return 4 if widened else parameter.element_size()


def _th(count: int) -> str:
    return "" if count == 1 else f"{count}th "
