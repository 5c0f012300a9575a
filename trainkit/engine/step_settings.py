"""What an engine that takes over a part of the step must know of it before a fit is built."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainkit.engine.approximate.settings import Communication, Exact


@dataclass(frozen=True)
class StepSettings:
    """The settings of a fit's steps.

    Attributes:
        batch_size: samples of a microbatch; None for a stream of unknown batches.
        accumulate: microbatches that a rank takes in a step: the largest number, if it changes by epoch.
        clip_val: trainer.gradient_clip_val.
        clip_algorithm: trainer.gradient_clip_algorithm.
        precision: trainer.precision.
        used: names of what the fit uses that an engine may lack: keys of the trainer ("trainer.compile"), and
            "manual_optimization", "batch_weight", "elastic".
        callbacks: names of the classes of its callbacks, with those that they derive from.
        communication: what travels between ranks.
    """

    batch_size: int | None
    accumulate: int
    clip_val: float | None
    clip_algorithm: str
    precision: str
    used: frozenset[str] = frozenset()
    callbacks: frozenset[str] = frozenset()
    communication: Communication = field(default_factory=Exact)
