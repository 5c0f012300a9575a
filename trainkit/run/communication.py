"""What approximate communication (trainer.communication) keeps in a checkpoint; engines do the
rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.api.view import RunView
from trainkit.checkpoint.contents import OWN, Part, RankPart
from trainkit.engine.base import Engine
from trainkit.run.feature import Feature


class SavedCommunication(Feature):
    """Of every fit: under exact communication both parts are empty."""

    name = "communication"

    def parts(self, run: RunView) -> Mapping[str, Part]:
        """What all ranks share."""
        return {"communication": _SharedPart(run.engine)}

    def rank_parts(self, run: RunView) -> Mapping[str, RankPart]:
        """What each rank has of its own."""
        return {OWN: _OwnPart(run.engine)}


class _SharedPart:
    """What is equal on all ranks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        return self._engine.approximation.shared_state()

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        return self._engine.approximation.load_shared(state)


class _OwnPart:
    """What is each rank's own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        return self._engine.approximation.own_state()

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        self._engine.approximation.load_own(states)
