"""Samples that cannot be loaded are left out of their batch (trainer.on_bad_sample=skip);
see data/bad_samples.py.
"""

from __future__ import annotations

from collections.abc import Callable

from trainkit.api.view import RunView
from trainkit.data.bad_samples import BadSamples
from trainkit.run.feature import Feature


class SkipBadSamples(Feature):
    """See the module.

    Args:
        limit: different samples that may be skipped.
        skip: lets all feeds of the stage do so.
    """

    name = "trainer.on_bad_sample=skip"
    not_by_hand = "Leave it out, or load the data without errors"
    not_split = (
        "on_bad_sample is 'skip': a rank whose microbatch is all bad would run no forward, and the"
        " others wait for it. Leave it out."
    )

    def __init__(self, limit: int, skip: Callable[[BadSamples], None]) -> None:
        self._limit = limit
        self._skip = skip

    def model_made(self, run: RunView) -> None:
        """Make the log of all ranks' bad samples, before any feed."""
        comm = run.engine.comm
        bad = BadSamples(self._limit, comm.sum_number, comm.all_gather_object, run.say)
        bad.needs_every_microbatch = (
            run.options.numerics.sync_batchnorm and run.state.phase == "fit"
        )
        self._skip(bad)
