"""What an engine that takes over a part of the step must know of it before a fit is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainkit.engine.approximate.settings import Communication, Exact

# What a callback may need of a step, that an engine or a kind of communication may lack
# (Callback.needs_of_engine):
#     gradients          the gradient of each parameter, before the update
#     weights            each parameter whole, to read or to write
#     equal_weights      after each step the same weights on all ranks
#     optimizer_groups   parameters can be added to the optimizer during training
#     optimizer_state    the optimizer's state, the same on all ranks
#     whole_state        the whole training state on each rank
#     layers             all layers on each rank, which a pipeline's stages have not
Need = Literal[
    "gradients",
    "weights",
    "equal_weights",
    "optimizer_groups",
    "optimizer_state",
    "whole_state",
    "layers",
]


@dataclass(frozen=True)
class StepSettings:
    """The settings of a fit's steps.

    Attributes:
        batch_size: samples of a microbatch; None for a stream of unknown batches.
        accumulate: microbatches that a rank takes in a step: the largest number, if it changes by
            epoch.
        clip_val: trainer.gradient_clip_val.
        clip_algorithm: trainer.gradient_clip_algorithm.
        precision: trainer.precision.
        used: names of what the fit uses that an engine may lack: keys of the trainer
            ("trainer.compile"), and "manual_optimization", "batch_weight", "elastic".
        callbacks: what its callbacks need -> the class of the first one that needs it.
        communication: what travels between ranks.
    """

    batch_size: int | None
    accumulate: int
    clip_val: float | None
    clip_algorithm: str
    precision: str
    used: frozenset[str] = frozenset()
    callbacks: Mapping[Need, str] = field(default_factory=dict)
    communication: Communication = field(default_factory=Exact)
