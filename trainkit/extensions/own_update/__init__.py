"""Hooks of a Task around an update, as in Lightning: optimizer_step and
configure_gradient_clipping (docs/lightning.md).

feature.py   what a fit asks: the feature of a Task that has one of them
own_step.py  optimizer_step
"""

from trainkit.extension import Extension

EXTENSION = Extension(
    name="own_update",
    summary="optimizer_step of a Task: what it does around each update",
    proven="each commit",
    features=("trainkit.extensions.own_update.feature.of_stage",),
)
