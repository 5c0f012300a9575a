"""What a checkpoint is made of: named parts of a run, each with its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import nn

from trainkit.checkpoint.handed import Handed

# what each rank has of its own in approximate communication: too large for a commit
OWN = "communication_of_ranks"
# of batches by hand that no update has counted yet, on each rank: as large as the weights
GRADIENTS = "gradients_of_ranks"
# of an optimizer that is evaluated at other weights than it trains
TRAINED = "trained_weights"


class Part(Protocol):
    """A part of a run whose state is the same on all ranks."""

    def state_dict(self) -> Any:
        """Return tensors and plain values."""

    def load_state_dict(self, state: Any) -> Sequence[str] | None:
        """Take them back; return, in words, states that found no place."""


class RankPart(Protocol):
    """A part of a run whose state differs between ranks."""

    def state_dict(self) -> Any:
        """Return this rank's tensors and plain values."""

    def load_state_dicts(self, states: list[Any]) -> Sequence[str] | None:
        """Take back this rank's share of the states of all ranks that saved, in their order;
        return as above.
        """


class StepUndo(Protocol):
    """Brings a run back to where a step that failed began."""

    def remember(self) -> None:
        """Note where this rank is, before a step."""

    def undo(self) -> dict[str, Any] | None:
        """Return this rank's parts as of the last update; None if the weights are half updated."""


@dataclass(frozen=True)
class Contents:
    """What a checkpoint is made of.

    Attributes:
        task: its weights and buffers.
        parts: by name, in the order in which they are restored.
        rank_parts: the same, of each rank.
        about: returns what the manifest says of the run.
        saving: a context within which the weights are those to save; yields what hooks received.
    """

    task: nn.Module
    parts: Mapping[str, Part]
    rank_parts: Mapping[str, RankPart]
    about: Callable[[], dict[str, Any]]
    saving: Callable[[], AbstractContextManager[Handed]]
    # parts that rank 0 alone may know in full: the run's files
    rank_0_parts: Sequence[str] = ("callbacks",)
    # that a checkpoint of the same run may lack
    optional_parts: Sequence[str] = (
        "datamodule",
        "communication",
        "facts",
        OWN,
        GRADIENTS,
        TRAINED,
    )


class AfterWriting(NamedTuple):
    """What follows a checkpoint that was written, in the same thread:
    links (name -> target), and checkpoints to remove.
    """

    links: Mapping[str, str]
    removed: Sequence[str]


NOTHING = AfterWriting({}, ())
