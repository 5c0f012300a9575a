"""Weights and buffers that no checkpoint can hold: sparse ones, those of a dtype that safetensors
lacks, and entries of a state_dict that are no tensors. Named before the first step, not after the
epoch that was to be saved.
"""

from __future__ import annotations

from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.callbacks.checkpoint import checkpoint_policies
from trainkit.errors import TaskError
from trainkit.run.feature import Feature
from trainkit.run.setup import Stage

_ELSE = (
    " If the constructor makes it, register it with persistent=False: it is then in no checkpoint."
)


def of_stage(stage: Stage) -> Unwritable | None:
    """Return the feature of a fit with checkpoints; None if the Task, or a callback of the user's,
    may change what they hold.
    """
    changes = type(stage.task).on_save_checkpoint is not Task.on_save_checkpoint or any(
        type(each).on_save_checkpoint is not Callback.on_save_checkpoint
        for each in stage.run.callbacks
        if not type(each).__module__.startswith("trainkit.")
    )
    writes = stage.kind == "fit" and checkpoint_policies(stage.run.callbacks)
    return Unwritable() if writes and not changes else None


class Unwritable(Feature):
    """See the module."""

    name = "unwritable"

    def before_optimizers(self, run: RunView) -> None:
        """Look at each entry, and at each dtype once.

        Raises:
            TaskError: one cannot be written.
        """
        kind = type(run.task).__name__
        known: set[torch.dtype] = set()
        for name, value in run.task.state_dict().items():
            if why := _why(value, known):
                raise TaskError(f"{kind}.state_dict()['{name}'] {why}")


def _why(value: Any, known: set[torch.dtype]) -> str:
    """Return why it cannot be written, and what to do; "" if it can."""
    if not isinstance(value, torch.Tensor):
        return (
            f"is a {type(value).__name__}; weights are tensors. Keep other things in"
            " on_save_checkpoint."
        )
    if value.layout is not torch.strided:
        return (
            f"is sparse ({value.layout}), which a checkpoint cannot hold. Hold it dense, and call"
            f" to_sparse() where it is used.{_ELSE}"
        )
    if value.dtype not in known:
        try:
            safetensors.torch.save({"": torch.empty(0, dtype=value.dtype)})
        except (KeyError, RuntimeError, SafetensorError):
            return (
                f"is of {value.dtype}, which safetensors, the form of checkpoints, lacks. Hold it"
                f" in another dtype (a complex128 as torch.view_as_real of it).{_ELSE}"
            )
        known.add(value.dtype)
    return ""
