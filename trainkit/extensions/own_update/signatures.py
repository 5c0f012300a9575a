"""The arguments of a Task's hooks around an update, which Lightning 1 gave others."""

from __future__ import annotations

import inspect

from trainkit.api.step_call import has_step
from trainkit.api.task import Task
from trainkit.errors import TaskError
from trainkit.run.setup import Stage

_HOOKS = {  # -> by position, by name
    "optimizer_step": (("epoch", "batch_idx", "optimizer", "optimizer_closure"), ()),
    "optimizer_zero_grad": (("epoch", "batch_idx", "optimizer"), ()),
    "configure_gradient_clipping": (
        ("optimizer",),
        ("gradient_clip_val", "gradient_clip_algorithm"),
    ),
    "lr_scheduler_step": (("scheduler", "metric"), ()),
}


def of_stage(stage: Stage) -> None:
    """Refuse a hook that cannot be called before the hours that may pass until it is.

    Raises:
        TaskError: there is one.
    """
    task = stage.task
    if stage.kind != "fit" or not task.automatic_optimization:
        return  # none is called
    for name, (positions, names) in _HOOKS.items():
        if not has_step(task, Task, name):
            continue
        signature = inspect.signature(getattr(task, name))
        try:
            signature.bind(*positions, **dict.fromkeys(names))
        except TypeError:
            own = ", ".join(signature.parameters)
            given = ", ".join([*positions, *(f"{each}=..." for each in names)])
            raise TaskError(
                f"{type(task).__name__}.{name}({own}) is called with ({given}), which it does not"
                " take. Lightning 1's further arguments, as optimizer_idx, have been left out since"
                " Lightning 2."
            ) from None
