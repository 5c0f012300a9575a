"""What DeepSpeed's engine cannot serve: each is refused before training, with the reason.
Imports no DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainkit.arguments import show
from trainkit.engine.reduce.buckets import find_sparse
from trainkit.engine.step_settings import Need, StepSettings
from trainkit.errors import ConfigError, TaskError
from trainkit.optim.schedule_free import has_switch

_ELSE = "Use engine=ddp"
PRECISIONS = ("32-true", "bf16-mixed")

# What a fit uses -> what is said of it.
_USED = {
    "manual_optimization": (
        "automatic_optimization is False, but DeepSpeed makes backward, clipping and update"
        f" itself, as one step. Let the trainer optimize, or: {_ELSE}."
    ),
    "configure_gradient_clipping": (
        "The Task defines configure_gradient_clipping, and DeepSpeed clips and updates at once. Set"
        f" trainer.gradient_clip_val, or: {_ELSE}."
    ),
    "batch_weight": (
        "The Task defines batch_weight, but with it the factor of a gradient is known only after"
        " the sum over ranks, and DeepSpeed clips and updates right after its sum. Leave it out,"
        f" or: {_ELSE}."
    ),
    "trainer.halve_batch_on_oom": (
        "trainer.halve_batch_on_oom is true, but a rank that runs out of memory leaves the others "
        f"in the middle of DeepSpeed's gather of weights. Leave it out, or: {_ELSE}."
    ),
    "trainer.compile": (
        "trainer.compile is set, but torch.compile was not tested with DeepSpeed's hooks on"
        f" modules. Leave it out, or: {_ELSE}."
    ),
    "trainer.assert_no_sync": (
        "trainer.assert_no_sync is true, but DeepSpeed's step reads values from the device. "
        f"Leave it out, or: {_ELSE}."
    ),
}

# What a callback needs -> why DeepSpeed lacks it, and from which stage on.
_NEEDS: dict[Need, tuple[str, int]] = {
    "optimizer_groups": (
        (
            "adds parameters to the optimizer, and DeepSpeed splits the optimizer's state once, at"
            " the start"
        ),
        1,
    ),
    "optimizer_state": (
        "compares the optimizer's state of all ranks, and DeepSpeed gives each rank another part",
        1,
    ),
    "whole_state": (
        "needs each rank to hold the whole state, and DeepSpeed splits it over the ranks",
        1,
    ),
    "gradients": ("reads gradients of parameters, which DeepSpeed keeps in buffers of its own", 1),
    "weights": (
        "reads or writes the weights of each parameter, which stage 3 splits over the ranks",
        3,
    ),
}

# DeepSpeed lays many parameters end to end and updates a piece of that: right only for element by
# element.
_ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Adadelta",
    "Rprop",
    "ASGD",
    "AdEMAMix",
)
_BY_GROUP = ("AdEMAMix",)  # those that count steps by group
_OTHERS = {
    "Adagrad": (
        "DeepSpeed replaces a torch Adagrad by one of its own, which the schedules of rates do not"
        " reach"
    ),
    "SparseAdam": "it needs sparse gradients, and DeepSpeed's ZeRO has dense ones only",
    "LBFGS": "it evaluates the loss several times in a step",
}
_LEGAL = f"Legal are {', '.join(_ELEMENTWISE)}"
_BY_TENSOR = (
    "it computes with the shape or the norm of each parameter, and DeepSpeed hands the optimizer a"
    " flat piece of many parameters (only updates that treat each element alone are right then)"
)


def check_settings(settings: StepSettings, stage: int) -> None:
    """Refuse settings of a fit.

    Raises:
        ConfigError: DeepSpeed cannot serve one.
    """
    for name in sorted(settings.used & _USED.keys()):
        raise ConfigError(f"engine=deepspeed: {_USED[name]}")
    for need, (why, first) in _NEEDS.items():
        if need in settings.callbacks and stage >= first:
            name = settings.callbacks[need]
            lower = " a lower engine.stage, or" if first > 1 else ""
            raise ConfigError(
                f"engine=deepspeed, stage {stage}: the callback {name} {why}. Leave it out, or"
                f" use{lower} engine=ddp."
            )
    if settings.clip_val is not None and settings.clip_algorithm != "norm":
        raise ConfigError(
            f"trainer.gradient_clip_algorithm is {show(settings.clip_algorithm)}, but DeepSpeed"
            " clips by the norm of all gradients only. Use gradient_clip_algorithm=norm, or:"
            f" {_ELSE}."
        )
    if settings.precision not in PRECISIONS:
        why = {
            "16-mixed": (
                "DeepSpeed's float16 keeps weights in float16 and a loss scale of its own, which"
                " trainkit's checkpoints do not hold"
            ),
            "bf16-true": (
                "DeepSpeed keeps a float32 copy of bfloat16 weights and updates that, which is"
                " another method"
            ),
            "64-true": "DeepSpeed updates float32 weights",
        }.get(settings.precision, "DeepSpeed has none of that name")
        raise ConfigError(
            f"trainer.precision is '{settings.precision}', and with engine=deepspeed it must be one"
            f" of {', '.join(PRECISIONS)}: {why}."
        )


def check_optimizers(
    task: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    allows_untested: bool,
    stage: int,
) -> None:
    """Refuse several optimizers, and those that update a flat piece of the parameters in another
    way.

    Args:
        task: the owner of the parameters.
        optimizers: of the fit.
        allows_untested: whether the user's config has zero_allow_untested_optimizer, which accepts
            optimizers that neither trainkit nor torch has.
        stage: of ZeRO.

    Raises:
        TaskError: DeepSpeed cannot serve them.
    """
    if len(optimizers) != 1:
        raise TaskError(
            f"{type(task).__name__}.configure_optimizers returned {len(optimizers)} optimizers, and"
            f" DeepSpeed takes one. Put the parameters into groups of one optimizer, or: {_ELSE}."
        )
    optimizer = optimizers[0]
    name, home = type(optimizer).__name__, type(optimizer).__module__
    is_known = home.startswith(("torch.optim", "trainkit."))
    if not (is_known and name in _ELEMENTWISE) and (is_known or not allows_untested):
        why = _OTHERS.get(name, _BY_TENSOR)
        if not is_known:
            why = (
                "trainkit does not know whether its update treats each element alone. If so, set"
                " engine.config's "
            )
            why += "zero_allow_untested_optimizer to true"
        raise TaskError(
            f"The optimizer is {name}, and with engine=deepspeed it cannot be: {why}. {_LEGAL};"
            f" else: {_ELSE}."
        )
    if stage == 3 and name in _BY_GROUP:
        raise TaskError(
            f"The optimizer is {name}, which counts steps by group, and DeepSpeed's stage 3 calls it"
            f" for each part of a group. Use engine.stage=2, or: {_ELSE}."
        )
    if has_switch(optimizer):
        raise TaskError(
            f"The optimizer is {name}, whose train() and eval() change the weights, and DeepSpeed"
            f" hands it copies of them. Else: {_ELSE}."
        )
    if any(not group["params"] for group in optimizer.param_groups):
        raise TaskError(
            "The optimizer has a group without parameters, which DeepSpeed drops. Leave the empty"
            " group out."
        )
    if find_sparse(task, optimizers):
        raise TaskError(
            "An embedding has sparse gradients, and DeepSpeed's ZeRO has dense ones only. Use"
            f" sparse=False, or: {_ELSE}."
        )
    for parameter_name, parameter in task.named_parameters():
        if parameter.dtype != torch.float32:
            raise TaskError(
                f"The parameter '{parameter_name}' is"
                f" {str(parameter.dtype).removeprefix('torch.')}, and engine=deepspeed takes"
                f" float32 weights. Convert it, or: {_ELSE}."
            )
