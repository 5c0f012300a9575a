"""StepRecord: what CrashCapsule records of a step in memory, and its stored form."""

from __future__ import annotations

import datetime
import math
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainkit.api.view import RunView
from trainkit.callbacks.checkpoint import checkpoint_policies
from trainkit.checkpoint.stateful import random_state, set_random_state, versions
from trainkit.data.feed import MapFeed, Microbatch
from trainkit.device.accelerator import generators, is_accelerator, name_of
from trainkit.extensions.capsule.batches import pack, tensors_in
from trainkit.safety.masking import scrubbed


@dataclass
class Taken:
    """A microbatch that was trained on."""

    batch: Any
    num_samples: int
    batch_idx: int
    random: tuple[Any, ...]
    loss: Tensor | None = None


@dataclass
class StepRecord:
    """A step of this rank: references to its microbatches, and a few numbers.

    Attributes:
        number: its key, TrainState.loop_steps before it; batches by hand may share a `step`.
        step: number of steps before it.
        epoch: its epoch.
        step_in_epoch: number of steps before it in the epoch.
        scaler: the loss scale's state; empty unless fp16.
        groups: the settings of each optimizer's parameter groups.
        taken: the microbatches so far.
        pieces: number of pieces a microbatch was split into (trainer.halve_batch_on_oom).
    """

    number: int
    step: int
    epoch: int
    step_in_epoch: int
    scaler: dict[str, Any]
    groups: list[list[dict[str, Any]]]
    taken: list[Taken] = field(default_factory=list)
    pieces: int = 1

    def losses(self) -> list[float]:
        """Return the recorded losses. Waits for the device."""
        return [float(taken.loss) for taken in self.taken if taken.loss is not None]


def raw_random() -> tuple[Any, ...]:
    """Return this process's random states, unconverted:
    converting them to the stored form takes longer.
    """
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    others = {name: kind.get_rng_state() for name, kind in generators().items()}
    return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate(), others


def _as_plain(raw: tuple[Any, ...]) -> dict[str, Any]:
    before = random_state()
    torch.set_rng_state(raw[0])
    if raw[1] is not None:
        torch.cuda.set_rng_state(raw[1])
    np.random.set_state(raw[2])
    random.setstate(raw[3])
    for name, state in raw[4].items():
        generators()[name].set_rng_state(state)
    plain = random_state()
    set_random_state(before)
    return plain


def as_stored(record: StepRecord) -> dict[str, Any]:
    """Return the content of step.pt: tensors of the host and plain values. Waits for the device."""
    microbatches = [
        {
            "batch": pack(taken.batch),
            "num_samples": taken.num_samples,
            "batch_idx": taken.batch_idx,
            "random": _as_plain(taken.random),
            "loss": None if taken.loss is None else taken.loss.cpu().clone(),
        }
        for taken in record.taken
    ]
    return {"microbatches": microbatches, "scaler": record.scaler, "groups": record.groups}


def about(
    trainer: RunView, record: StepRecord, why: str, weights_step: int | None
) -> dict[str, Any]:
    """Return the manifest of a step with the weights of a step, without the list of files.
    Waits for the device.
    """
    task = trainer.task
    numerics = trainer.options.numerics
    modules = dict(task.named_modules())
    return {
        "why": scrubbed(why, trainer.options.masked_values),
        "step": record.step,
        "epoch": record.epoch,
        "step_in_epoch": record.step_in_epoch,
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "total_steps": trainer.total_steps,
        "num_samples": step_size_of(trainer, record.epoch, record.step_in_epoch),
        "microbatches": _microbatches_of(trainer, record),
        "weights": _source_of_weights(weights_step, record.step),
        "weights_step": weights_step,
        "checkpoint": last_checkpoint(trainer),
        "task": f"{type(task).__module__}.{type(task).__qualname__}",
        "in_eval_mode": [name for name, module in modules.items() if not module.training],
        "frozen": [
            name for name, parameter in task.named_parameters() if not parameter.requires_grad
        ],
        "device": _device(trainer.engine.device),
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
        "settings": {
            "precision": numerics.precision,
            "channels_last": trainer.options.numerics.uses_channels_last(trainer.engine.device),
            "compile": numerics.compile,
            "deterministic": numerics.deterministic,
            "float32_matmul_precision": numerics.float32_matmul_precision,
            "sync_batchnorm": numerics.sync_batchnorm,
            "gradient_clip_val": numerics.gradient_clip_val,
            "gradient_clip_algorithm": numerics.gradient_clip_algorithm,
            "seed": trainer.options.seed,
        },
        "versions": versions(),
        "written": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "config": trainer.options.config,
    }


def _source_of_weights(weights_step: int | None, step: int) -> str:
    if weights_step is None:
        return "not those of this step any more; see checkpoint"
    if weights_step == step:
        return "of this step, before its update"
    return f"of step {weights_step}, where training started: there was no checkpoint yet"


def _microbatches_of(trainer: RunView, record: StepRecord) -> list[dict[str, Any]]:
    samples = samples_of(trainer, record.epoch, record.step_in_epoch)
    first = 0
    entries = []
    in_order = (
        None if samples is None else [index for of_microbatch in samples for index in of_microbatch]
    )
    for taken in record.taken:  # a microbatch may have been split: its pieces are adjacent
        loss = None if taken.loss is None else float(taken.loss)
        entries.append(
            {
                "batch_idx": taken.batch_idx,
                "num_samples": taken.num_samples,
                "loss": loss if loss is None or math.isfinite(loss) else str(loss),
                "samples": (
                    None if in_order is None else in_order[first : first + taken.num_samples]
                ),
                "batch": [
                    f"{place} {str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
                    for place, t in tensors_in(taken.batch)
                ],
            }
        )
        first += taken.num_samples
    return entries


def last_checkpoint(trainer: RunView) -> str | None:
    """Return the newest checkpoint that such a run can resume from, as far as this rank knows."""
    paths = [
        policy.last_model_path
        for policy in checkpoint_policies(trainer.callbacks)
        if policy.last_model_path
    ]
    return paths[-1] if paths else trainer.checkpoints.resumed_from


def _device(device: torch.device) -> str:
    return name_of(device) if is_accelerator(device) else f"cpu, {torch.get_num_threads()} threads"


def samples_of(trainer: RunView, epoch: int, step_in_epoch: int) -> list[list[int]] | None:
    """Return the data set's indices of each microbatch of a step on this rank;
    None for a stream, which has no indices.
    """
    feed = trainer.train_feed
    if not isinstance(feed, MapFeed):
        return None
    shares = feed.plan_of(epoch).microbatches(step_in_epoch, trainer.engine.ranks.data_rank)
    return [
        feed.indices(epoch, Microbatch(None, len(places), False, places)) or [] for places in shares
    ]


def step_size_of(trainer: RunView, epoch: int, step_in_epoch: int) -> int | None:
    """Return the number of samples of a step on all ranks; None for a stream."""
    feed = trainer.train_feed
    return feed.plan_of(epoch).samples_in(step_in_epoch) if isinstance(feed, MapFeed) else None


class BufferCopies:
    """Copies of the buffers that a checkpoint contains, on their device; `update` takes a kernel or
    two and does not wait.

    Args:
        model: its modules may replace a buffer's tensor at any time.
    """

    def __init__(self, model: nn.Module) -> None:
        state = model.state_dict()
        places = {
            f"{path}.{name}" if path else name: (m, name)
            for path, m in model.named_modules()
            for name in m._buffers
        }
        self._places = {name: place for name, place in places.items() if name in state}
        self.copies: dict[str, Tensor] = {}
        self.update()

    def update(self) -> None:
        """Copy the buffers in their current state."""
        pairs: defaultdict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(
            lambda: ([], [])
        )
        for name, (module, own) in self._places.items():
            live = module._buffers[own]
            copy = self.copies.get(name)
            if live is None:
                self.copies.pop(name, None)
            elif copy is None or copy.shape != live.shape or copy.dtype != live.dtype:
                self.copies[name] = live.detach().clone()
            else:
                copies, lives = pairs[live.dtype]
                copies.append(copy)
                lives.append(live.detach())
        # one dtype per list: a mixed list would take a kernel per tensor
        for copies, lives in pairs.values():
            torch._foreach_copy_(copies, lives)
