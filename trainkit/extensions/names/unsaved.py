"""Objects in a Task that have a state, and that no checkpoint holds: a scaler of one's own, an average
of another package, a scheduler that configure_optimizers did not return.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from trainkit.api.callback import Callback
from trainkit.api.datamodule import DataModule
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.callbacks.checkpoint import checkpoint_policies
from trainkit.optim.scheduler_state import with_inner


def unsaved(run: RunView) -> Iterator[str]:
    """Name them, if the run has checkpoints, unless the Task saves something itself."""
    kind: Any = type(run.task)
    by_task = (
        kind.on_save_checkpoint is not Task.on_save_checkpoint
        or kind.get_extra_state is not Task.get_extra_state
    )
    if by_task or not checkpoint_policies(run.callbacks):
        return
    ours = [*with_inner(config.scheduler for config in run.rates.schedules)]
    loose = [
        f"{name} ({type(value).__name__})"
        for name, value in vars(run.task).items()
        if not name.startswith("_")
        and all(callable(getattr(value, each, None)) for each in ("state_dict", "load_state_dict"))
        # data sets and loaders are at the run's own place
        and not isinstance(value, (type, Callback, DataModule, Optimizer))
        and not hasattr(value, "__iter__")
        and not any(value is one for one in ours)
    ]
    if loose:
        yield (
            f"The state of {kind.__name__}'s {', '.join(loose)} is in no checkpoint. If a resumed"
            " run needs it: save its state_dict() in on_save_checkpoint, take it in"
            " on_load_checkpoint, and load it in on_train_start."
        )
