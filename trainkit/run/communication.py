"""What approximate communication (trainer.communication) keeps in a checkpoint;
engine/approximate does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainkit.api.view import RunView
from trainkit.checkpoint.contents import OWN, Part, RankPart
from trainkit.engine.approximate.approximation import OwnPart, SharedPart
from trainkit.run.feature import Feature


class SavedCommunication(Feature):
    """Of every fit: under exact communication both parts are empty."""

    name = "communication"

    def parts(self, run: RunView) -> Mapping[str, Part]:
        """What all ranks share."""
        return {"communication": SharedPart(run.engine.approximation)}

    def rank_parts(self, run: RunView) -> Mapping[str, RankPart]:
        """What each rank has of its own."""
        return {OWN: OwnPart(run.engine.approximation, run.engine.comm)}
