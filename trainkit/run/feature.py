"""Feature: an option of a fit as one object: what it refuses, what it does at which moment, what it
keeps in a checkpoint.

build.py asks the features of a fit (features.py) at these moments, in this order:

    model_made          the Task has its modules; also of an entry point that evaluates
    data_read           feed and plan are there, also after loaders were made again: refuse what does not go with them
    before_optimizers   weights are loaded and split, optimizers are not made
    in_step             name what the training step works with: fields of StepParts
    begun               the run has all its parts
    parts, rank_parts   of a checkpoint, by name
    before_epoch        before the first step of an epoch

A feature that a fit does not ask for is not made, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from trainkit.api.view import RunView
from trainkit.checkpoint.contents import Part, RankPart
from trainkit.errors import ConfigError


class Feature:
    """See the module.

    Attributes:
        name: by which engines know it (StepSettings.used): the option's, if it has one.
        key: what the user writes for it, if that is another name.
        not_by_hand: what to do instead if the Task updates its weights itself; "" if it may.
        not_split: why, and what to do instead, if ranks hold parts of the weights; "" if they may.
    """

    name: str
    key = ""
    not_by_hand = ""
    not_split = ""

    def model_made(self, run: RunView) -> None:
        """See the module."""

    def data_read(self, run: RunView) -> None:
        """See the module."""

    def before_optimizers(self, run: RunView) -> None:
        """See the module."""

    def in_step(self, run: RunView, optimizers: Sequence[Optimizer]) -> Mapping[str, Any]:
        """See the module."""
        return {}

    def begun(self, run: RunView) -> None:
        """See the module."""

    def parts(self, run: RunView) -> Mapping[str, Part]:
        """See the module."""
        return {}

    def rank_parts(self, run: RunView) -> Mapping[str, RankPart]:
        """See the module."""
        return {}

    def before_epoch(self, epoch: int) -> None:
        """See the module."""


class Features(list[Feature]):
    """Those of one fit, asked one after the other, in their order."""

    def model_made(self, run: RunView) -> None:
        """Ask each."""
        for feature in self:
            feature.model_made(run)

    def data_read(self, run: RunView) -> None:
        """Ask each."""
        for feature in self:
            feature.data_read(run)

    def before_optimizers(self, run: RunView) -> None:
        """Ask each."""
        for feature in self:
            feature.before_optimizers(run)

    def in_step(self, run: RunView, optimizers: Sequence[Optimizer]) -> Mapping[str, Any]:
        """Ask each."""
        return self._joined(lambda feature: feature.in_step(run, optimizers))

    def begun(self, run: RunView) -> None:
        """Ask each."""
        for feature in self:
            feature.begun(run)

    def parts(self, run: RunView) -> Mapping[str, Part]:
        """Ask each."""
        return self._joined(lambda feature: feature.parts(run))

    def rank_parts(self, run: RunView) -> Mapping[str, RankPart]:
        """Ask each."""
        return self._joined(lambda feature: feature.rank_parts(run))

    def before_epoch(self, epoch: int) -> None:
        """Ask each."""
        for feature in self:
            feature.before_epoch(epoch)

    def _joined(self, named: Callable[[Feature], Mapping[str, Any]]) -> dict[str, Any]:
        """Return what each names.

        Raises:
            ConfigError: two name the same: the second would be used, and the first not.
        """
        joined: dict[str, Any] = {}
        owners: dict[str, str] = {}
        for feature in self:
            own = feature.key or feature.name
            for name, part in named(feature).items():
                if name in joined:
                    raise ConfigError(
                        f"{owners[name]} and {own} both bring a fit's '{name}': leave one of them out."
                    )
                joined[name] = part
                owners[name] = own
        return joined
