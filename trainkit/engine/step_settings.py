"""What an engine that takes over a part of the step must know of it before a fit is built, and what
travels between ranks, as `communication=` names it. Imports no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from trainkit import extension
from trainkit.arguments import show
from trainkit.engine.approximation import Approximation
from trainkit.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from trainkit.engine.collectives import Collectives

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


class Communication(ABC):
    """Settings of what travels between ranks.

    Attributes:
        name: as `communication=` names them.
        start_after_steps: exact steps first.
    """

    name: str
    start_after_steps = 0
    config_key = "communication"

    @abstractmethod
    def describe(self) -> str:
        """Return them in words, as the contract of batch and rate compares them."""

    @abstractmethod
    def begin(
        self, settings: StepSettings, engine: str, options: Mapping[str, Any], comm: Collectives
    ) -> Approximation:
        """Return what the engine of a fit does by them.

        Args:
            engine: its name.
            options: those of the engine that are not its defaults.

        Raises:
            ConfigError: the fit has settings that do not go with them.
        """


class Exact(Communication):
    """The gradient of a step is the exact sum over ranks."""

    name = "exact"

    def describe(self) -> str:
        """See Communication."""
        return "exact"

    def begin(
        self, settings: StepSettings, engine: str, options: Mapping[str, Any], comm: Collectives
    ) -> Approximation:
        """See Communication."""
        return Approximation(comm.ranks)


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
        sample: returns the training data's first sample as a batch on the device; None for a stream.
    """

    batch_size: int | None
    accumulate: int
    clip_val: float | None
    clip_algorithm: str
    precision: str
    used: frozenset[str] = frozenset()
    callbacks: Mapping[Need, str] = field(default_factory=dict)
    communication: Communication = field(default_factory=Exact)
    sample: Callable[[], Any] | None = None


_OWN = {Exact.name: f"{__name__}.{Exact.__name__}"}


def communication_of(given: object) -> Communication:
    """Return the settings that a Trainer's `communication` names: such an object, or the name of
    one.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(given, Communication):
        return given
    names = [*_OWN, *extension.names("communications")]
    if isinstance(given, str) and given in names:
        made: Communication = extension.resolve(extension.find("communications", given, _OWN))()
        return made
    hint = did_you_mean(given, names) if isinstance(given, str) else ""
    shown = (
        show(given)
        if isinstance(given, (str, int, float, bool, type(None)))
        else f"a {type(given).__name__}"
    )
    raise ConfigError(
        f"trainer.communication is {shown}; it must be one of {', '.join(names)}, or an object as "
        f"trainkit.DiLoCo(every_n_steps=50).{hint}"
    )
