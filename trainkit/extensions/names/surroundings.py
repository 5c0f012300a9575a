"""What other libraries have set up around a fit, and trainkit does not read: what `accelerate launch`
asks for, and a Horovod, an Accelerator or torch.distributed that sees one rank where there are
several. And an `engine.op` of Horovod's: beside rates that follow the ranks, which Horovod's scripts
scale by hand, and Adasum of gradients, where Horovod's is that of updates.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer

from trainkit.api.view import RunView
from trainkit.arguments import show

_PRECISIONS = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed", "fp8": "fp8-mixed"}


def unread(run: RunView) -> Iterator[str]:
    """Yield what variables of `accelerate launch` ask for that this run does not have."""
    numerics, engine = run.options.numerics, run.engine.name
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if _PRECISIONS.get(asked, numerics.precision) not in ("32-true", numerics.precision):
        yield _unread(
            f"mixed_precision={asked}",
            f"trainer.precision is '{numerics.precision}'",
            f"Set trainer.precision={_PRECISIONS[asked]}",
        )
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO" and not numerics.compile:
        yield _unread("dynamo_config", "trainer.compile is false", "Set trainer.compile=true")
    for name in ("fsdp", "deepspeed"):
        if _is_asked(name) and engine != name:
            yield _unread(f"{name}_config", f"the engine is {engine}", f"Set engine={name}")
    if _is_asked("cpu") and run.engine.device.type != "cpu":
        yield _unread("use_cpu", f"the device is {run.engine.device}", "Set engine.device=cpu")
    for name in ("megatron_lm", "parallelism_config"):
        if _is_asked(name) and engine != "fsdp":
            remedy = "Set engine=fsdp, with engine.tensor, context or pipeline"
            yield _unread(name, f"the engine is {engine}", remedy)
    for variable, default, key, value in (
        ("ACCUMULATION_STEPS", 1, "trainer.accumulate_grad_batches", run.batch_plan.accumulate),
        ("CLIPPING", 0, "trainer.gradient_clip_val", numerics.gradient_clip_val or 0),
    ):
        text = os.environ.get(f"ACCELERATE_GRADIENT_{variable}", "")
        if text.replace(".", "", 1).isdigit() and float(text) not in (default, value):
            setting = f"gradient_{variable.lower()}={text}"
            yield _unread(setting, f"{key} is {show(value or None)}", f"Set {key}={text}")


def _is_asked(name: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{name.upper()}", "").lower() == "true"


def _unread(what: str, here: str, remedy: str) -> str:
    return (
        f"accelerate's config has {what}, which only its Accelerator reads: {here}. {remedy}, or"
        " leave it out there."
    )


def alone(run: RunView) -> Iterator[str]:
    """Yield which libraries take each rank for the only one."""
    if run.world_size == 1:
        return
    horovod: Any = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized() and horovod.size() == 1:
        yield _alone("Horovod", "hvd.rank() is 0 on each", run)
    state: Any = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if state is not None and state._shared_state and state().num_processes == 1:
        yield _alone("accelerate", "is_main_process is true on each", run)
    dist: Any = sys.modules["torch.distributed"]
    if (users := _users_of(dist, run.task)) and not dist.is_initialized():
        consequence = f"{', '.join(users)} can use it, and it has no group (torchrun makes one)"
        yield _alone("torch.distributed", consequence, run)


def _users_of(dist: object, task: nn.Module) -> list[str]:
    """Return the names of classes in a Task whose module has imported torch.distributed, as those of
    losses that gather features. trainkit sums what torchmetrics' objects count.
    """
    kinds = {type(part) for part in task.modules()}
    return sorted(
        kind.__name__
        for kind in kinds
        if kind.__module__.partition(".")[0] not in ("torch", "torchmetrics", "trainkit")
        and (module := sys.modules.get(kind.__module__)) is not None
        and any(value is dist for value in vars(module).values())
    )


def _alone(library: str, consequence: str, run: RunView) -> str:
    return (
        f"{library} sees 1 rank, and this run has {run.world_size} (engine={run.engine.name}):"
        f" {consequence}, and its sums and gathers have one rank's values. Use trainkit.rank(),"
        " trainkit.world_size() and self.all_gather, or a launcher that it knows."
    )


def scaled_twice(run: RunView) -> Iterator[str]:
    """Yield that gradients of several ranks' size meet a rate that was scaled for them."""
    op, scaling = run.engine.shown_options.get("op"), run.options.batch.lr_scaling
    if run.world_size > 1 and scaling != "none" and op in ("sum", "adasum"):
        size = "has the size of all ranks' together" if op == "sum" else "adapts its size itself"
        yield (
            f"engine.op is '{op}', whose gradient {size}, and rates are scaled for"
            f" {run.world_size} ranks too (trainer.lr_scaling={scaling}). Set"
            " trainer.lr_scaling=none, as Horovod's examples do."
        )


def adasum_of_gradients(run: RunView) -> Iterator[str]:
    """Yield that Adasum trains otherwise than Horovod's DistributedOptimizer, which updates on each
    rank and combines what changed: the same if an update is the gradient times a rate.
    """
    if run.world_size == 1 or run.engine.shown_options.get("op") != "adasum":
        return
    causes = sorted({_name(each) for each in run.optimizers if not _is_plain(each)})
    causes += ["trainer.gradient_clip_val"] * bool(run.options.numerics.gradient_clip_val)
    if causes:
        yield (
            "engine.op is 'adasum': gradients of the ranks are combined, where"
            " hvd.DistributedOptimizer with op=hvd.Adasum combines their updates. With"
            " SGD alone both are the same; with"
            f" {' and '.join(causes)} the weights differ from Horovod's."
        )


def _is_plain(optimizer: Optimizer) -> bool:
    return type(optimizer) is SGD and not any(
        group["momentum"] or group["weight_decay"] for group in optimizer.param_groups
    )


def _name(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    return "SGD with momentum or weight decay" if kind is SGD else kind.__name__
