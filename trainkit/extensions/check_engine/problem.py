"""The settings with which one process takes the same steps as ranks: samples, microbatches, rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainkit.errors import ConfigError
from trainkit.extensions.plan.planned import planned
from trainkit.extensions.script.subject import Subject

_ERRORS = {"bf16": 2.0**-8, "16": 2.0**-11, "fp16": 2.0**-11, "64": 2.0**-52}


@dataclass(frozen=True)
class Problem:
    """See the module.

    Attributes:
        settings: of the Trainer, in all runs.
        batch_size: of one process; None: that of a rank.
        samples: of a step.
    """

    settings: dict[str, Any]
    batch_size: int | None
    samples: int


def problem_of(subject: Subject, run_dir: str, ranks: int) -> Problem:
    """Return the problem of a fit at the launcher's ranks, which may be simulated.

    One process takes the ranks' microbatches one after the other, so that what depends on a
    microbatch (batch norm) is the same; with sync_batchnorm, those of a round as one.

    Args:
        subject: the fit.
        run_dir: a temporary folder.
        ranks: of the checked run.

    Raises:
        ConfigError: one process cannot take these steps.
    """
    task = subject.requested.task
    if not task.automatic_optimization:
        raise ConfigError(
            f"{type(task).__name__} has automatic_optimization = False: its training_step updates"
            " the weights itself, so there are no gradients of a step that could be compared. A"
            " Task that returns its loss can be checked."
        )
    with planned(subject, run_dir) as built:
        contract = built.run.batch_plan
    if contract.later or contract.batch_size is None or contract.global_batch_size is None:
        why = (
            "the accumulation changes by epoch"
            if contract.later
            else "the training data are batches of unknown size"
        )
        raise ConfigError(
            f"{why[0].upper()}{why[1:]}: one process could not take the steps of {ranks} ranks. Pass"
            " a DataLoader over samples, and a fixed accumulation."
        )
    settings: dict[str, Any] = {
        "global_batch_size": contract.global_batch_size,
        "accumulate_grad_batches": None,
    }
    if contract.lr_scaling != "none" and contract.lr_reference_batch_size is None:
        settings["lr_reference_batch_size"] = contract.batch_size * contract.accumulate
    batch_size = None
    if subject.requested.options.numerics.sync_batchnorm and contract.world_size > 1:
        batch_size = contract.batch_size * contract.world_size
    return Problem(settings, batch_size, contract.global_batch_size)


def error_of(precision: str, param_dtype: str | None) -> float:
    """Return the relative rounding error of what a run computes in."""
    names = [precision.partition("-")[0], param_dtype or ""]
    return max(_ERRORS.get(name, 2.0**-23) for name in names if name)
