"""Hooks of a Task around an update, as in Lightning: optimizer_step, configure_gradient_clipping
and optimizer_zero_grad (docs/lightning.md).

own_zero_grad.py  optimizer_zero_grad
own_clip.py       configure_gradient_clipping
own_step.py       optimizer_step, around it
signatures.py     refuses those with other arguments
"""

from trainkit.extension import Extension

_ROOM = "trainkit.extensions.own_update"

EXTENSION = Extension(
    name="own_update",
    summary="optimizer_step, configure_gradient_clipping and optimizer_zero_grad of a Task",
    proven="each commit",
    # own_clip is within own_step
    features=tuple(
        f"{_ROOM}.{part}.of_stage"
        for part in ("signatures", "own_zero_grad", "own_clip", "own_step")
    ),
)
