"""Which engine a run fits in: the memory of a rank under each, and the first that a GPU of a given
size can hold.

With W, G and O the bytes of weights, gradients and optimizer state, B the weights of the two
largest blocks, A the activations of a microbatch (C with activation checkpointing), and n ranks
that split them (Rajbhandari et al. 2020, section 5):

    ddp              W + G + O + A                      each rank holds all
    fsdp, ZeRO 2     (W + G + O) / n + W + A            weights stay gathered from forward to backward
    fsdp             (W + G + O) / n + B + A            one block is gathered while the next one is fetched
    context ranks    (W + G + O) / n + B + A'           A' of a part of each sequence, with the keys of all
    offloaded        B + C                              the rest is in host memory

A step moves 2 W per rank under ddp and ZeRO 2 (sums of gradients; a gather and sums of parts), and
3 W under ZeRO 3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.api.step_call import call_step
from trainkit.api.task import LogTarget, loss_of
from trainkit.data.feed import MapFeed, Microbatch
from trainkit.engine.blocks import repeated_blocks
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.context.pretended import PretendedGroup, pretended_step
from trainkit.extensions.plan.plan import Sizes
from trainkit.extensions.reports.grid import human
from trainkit.metrics.log import MetricLog
from trainkit.run.oom import split
from trainkit.run.recompute import recomputed
from trainkit.run.run import Run

_ROOM = 0.9  # of a GPU's memory: the rest is CUDA's, NCCL's and the allocator's
_OF_GB = 10**9
_CONTEXT = (2, 4, 8)  # ranks of a host that may share a sequence


@dataclass(frozen=True)
class Shared:
    """What a rank needs that has a part of each sequence (engine.context).

    Attributes:
        ranks: that share a sequence.
        activations: as of Need, like `recomputed`.
        sent: bytes of keys, values and their gradients that a rank sends in a step.
    """

    ranks: int
    activations: int
    recomputed: int | None
    sent: int


@dataclass(frozen=True)
class Need:
    """What a microbatch needs beside weights, gradients and optimizer state.

    Attributes:
        activations: bytes kept for backward.
        recomputed: the same with activation checkpointing; None if the model has no repeated
            blocks.
        gathered: bytes of the weights of two blocks, the largest ones.
        shared: with ranks that share each sequence; none of a Task that takes no part of it.
    """

    activations: int
    recomputed: int | None
    gathered: int
    shared: tuple[Shared, ...] = ()


@dataclass(frozen=True)
class FitChoice:
    """A setting, the bytes of a rank's GPU under it, those of its host memory, those that a step
    sends, and what else it changes.
    """

    settings: str
    device: int
    host: int
    traffic: int
    note: str = ""


def measure_need(run: Run) -> Need:
    """Measure one sample's forward on the CPU, times the samples of the largest microbatch of a
    rank.

    Raises:
        ConfigError: there is no batch to measure.
    """
    step = next(iter(run.train_feed.steps(0)), None)
    microbatch = next(iter(step.microbatches), None) if step is not None else None
    if microbatch is None:
        raise ConfigError(
            "memory_gb needs a batch of training data, and rank 0 has none. Use fewer ranks."
        )
    blocks = list(repeated_blocks(run.task))
    sizes = sorted((_bytes(block) for block in blocks), reverse=True)
    rest = _bytes(run.task) - sum(sizes)
    largest = microbatch.num_samples
    # of all ranks: trainer.rank_shares may give another one more
    if isinstance(run.train_feed, MapFeed):
        deals = run.train_feed.plan_of(0)
        largest = max(
            len(part) for rank in range(deals.world_size) for part in deals.microbatches(0, rank)
        )
    plain = _kept(run, microbatch) * largest
    with recomputed(run.task, bool(blocks)):
        again = _kept(run, microbatch) * largest if blocks else None
    shared = tuple(_shared(run, microbatch, largest, bool(blocks)))
    return Need(plain, again, rest + sum(sizes[:2]), shared)


def _shared(run: Run, microbatch: Microbatch, samples: int, has_blocks: bool) -> Iterator[Shared]:
    """Measure a rank that shares sequences with 2, 4 and 8 ranks of its host."""
    ranks = run.engine.ranks
    for count in _CONTEXT:
        if ranks.local_size % count or ranks.world_size % count:
            return
        group = PretendedGroup(count)
        try:
            plain = _kept(run, microbatch, group) * samples
            sent = group.sent * samples * run.batch_plan.accumulate
            with recomputed(run.task, has_blocks):
                again = _kept(run, microbatch, group) * samples if has_blocks else None
        except (ConfigError, TaskError):  # it takes no part, or cannot
            return
        yield Shared(count, plain, again, sent)


def choices(sizes: Sizes, need: Need, ranks: int, ranks_per_host: int) -> list[FitChoice]:
    """Return the settings, the fastest first: those that send least, and compute nothing twice."""
    state = sizes.weights + sizes.gradients + sizes.optimizer
    weights = sizes.weights
    layouts = [FitChoice("engine=auto", state + need.activations, 0, 2 * sizes.payload)]
    if ranks == 1:
        return layouts if need.recomputed is None else [*layouts, _saving(layouts[0], need, state)]
    again = need.activations if need.recomputed is None else need.recomputed
    suffix = "" if need.recomputed is None else " trainer.activation_checkpointing=true"
    hosts = ranks // ranks_per_host
    across = (
        [(f" engine.replicas={hosts}", ranks_per_host)]
        if hosts > 1 and ranks == hosts * ranks_per_host
        else []
    )
    for activations, more in [(need.activations, ""), *([(again, suffix)] if suffix else [])]:
        layouts.append(
            FitChoice(
                f"engine=fsdp engine.reshard_after_forward=false{more}",
                state // ranks + weights + activations,
                0,
                2 * weights,
            )
        )
        for replicas, parts in [*across, ("", ranks)]:
            layouts.append(
                FitChoice(
                    f"engine=fsdp{replicas}{more}",
                    state // parts + need.gathered + activations,
                    0,
                    3 * weights,
                )
            )
    for one in need.shared:
        for own, more in [(one.activations, ""), *([(one.recomputed, suffix)] if suffix else [])]:
            layouts.append(
                FitChoice(
                    f"engine=fsdp engine.context={one.ranks}{more}",
                    state // ranks + need.gathered + (own or 0),
                    0,
                    3 * weights + one.sent,
                    f"; a step has 1/{one.ranks} of the samples, or trainer.global_batch_size",
                )
            )
    layouts.append(
        FitChoice(
            f"engine=fsdp engine.cpu_offload=true{suffix}",
            need.gathered + again,
            state // ranks,
            3 * weights,
        )
    )
    return layouts


def _saving(plain: FitChoice, need: Need, state: int) -> FitChoice:
    return FitChoice(
        f"{plain.settings} trainer.activation_checkpointing=true",
        state + (need.recomputed or 0),
        0,
        plain.traffic,
    )


def fit_rows(
    layouts: Sequence[FitChoice], need: Need, memory_gb: float, typed: str
) -> tuple[list[tuple[str, str]], bool]:
    """Return a row for each choice, and how to start the first that fits in a GPU of `memory_gb`;
    and whether one fits.

    Args:
        typed: the arguments of the fit: overrides, or a script and its own.
    """
    room = memory_gb * _OF_GB * _ROOM
    activations = f"{human(need.activations)} for a microbatch, measured on one sample"
    if need.recomputed is not None:
        activations += f"; {human(need.recomputed)} with trainer.activation_checkpointing=true"
    rows = [
        ("activations", activations),
        ("room", f"{memory_gb:g} GB less a tenth for CUDA, NCCL and the allocator"),
    ]
    layouts = _of_use(layouts, room)
    for choice in layouts:
        host = f", {human(choice.host)} of the host's" if choice.host else ""
        verdict = "fits" if choice.device <= room else "does not fit"
        rows.append(
            (
                choice.settings,
                f"{human(choice.device)} a rank{host}, sends {human(choice.traffic)}: {verdict}"
                f"{choice.note}",
            )
        )
    best = next((choice for choice in layouts if choice.device <= room), None)
    if best is None:
        rows.append(
            (
                "none fits",
                "use more ranks, a smaller data.batch_size, or trainer.precision=bf16-mixed",
            )
        )
    else:
        rows.append(("use", _use(best.settings, typed)))
    return rows, best is not None


def _of_use(layouts: Sequence[FitChoice], room: float) -> list[FitChoice]:
    """Return the choices without those that change a step, if an earlier one fits."""
    result: list[FitChoice] = []
    for choice in layouts:
        if not choice.note or all(earlier.device > room for earlier in result):
            result.append(choice)
    return result


def _use(settings: str, typed: str) -> str:
    """Return how to start a choice."""
    if typed.split(" ")[0].endswith(".py"):
        start = "python" if settings.startswith("engine=auto") else "torchrun ..."
        own = [word.removeprefix("trainer.") for word in settings.split(" ")]
        given = ", ".join(word for word in own if word != "engine=auto")
        return f"{start} {typed}" + f", and give its Trainer {given}" * bool(given)
    launcher = "" if settings.startswith("engine=auto") else "torchrun ... -m trainkit "
    text = f"{launcher or 'python -m trainkit '}fit {typed} {settings}"
    return text.replace(" engine=auto", "")


def _kept(run: Run, microbatch: Microbatch, group: PretendedGroup | None = None) -> int:
    """Return the bytes that the forward of one sample of a microbatch keeps for backward.

    Args:
        group: of a rank that has a part of the sequence.

    Raises:
        TaskError: the step takes no part.
    """
    task = run.task
    count = microbatch.num_samples
    one = split(microbatch.batch, count, count)[0]
    weights = {p.untyped_storage().data_ptr() for p in (*task.parameters(), *task.buffers())}
    saved_bytes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            saved_bytes[place] = tensor.untyped_storage().nbytes()
        return tensor

    task._log_to(LogTarget(MetricLog(), 1, on_step=True, on_epoch=False))
    with contextlib.ExitStack() as stack:
        stack.callback(task._log_to, None)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        stack.enter_context(run.precision.autocast())
        step = None if group is None else stack.enter_context(pretended_step(task, group))
        outputs: Any = call_step(task, "training_step", one, 0)
    loss_of(outputs, task)
    if step is not None and not step.attends:
        raise TaskError(f"{type(task).__name__} takes no part of a sequence.")
    return sum(saved_bytes.values())


def _bytes(module: nn.Module) -> int:
    return sum({id(p): p.numel() * p.element_size() for p in module.parameters()}.values())
