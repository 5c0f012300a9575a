"""Hooks of a Task around an update, as in Lightning: optimizer_step and
configure_gradient_clipping (docs/lightning.md).

own_clip.py  configure_gradient_clipping
own_step.py  optimizer_step, around it
"""

from trainkit.extension import Extension

_ROOM = "trainkit.extensions.own_update"

EXTENSION = Extension(
    name="own_update",
    summary="optimizer_step and configure_gradient_clipping of a Task",
    proven="each commit",
    # the first is within the second
    features=(f"{_ROOM}.own_clip.of_stage", f"{_ROOM}.own_step.of_stage"),
)
