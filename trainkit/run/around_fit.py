"""What stands around a fit: nothing, or a command that runs the user's script and looks at the fit
that it asks for.

A Trainer asks `in_force` when it is constructed, and the answer is its own from then on: the Trainer
of a Loop fits in a greenlet, which has no context variables of its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from trainkit.api.callback import Callback
from trainkit.api.options import Options
from trainkit.api.task import Task
from trainkit.run.build import StartFrom
from trainkit.run.data_sources import DataSources


@dataclass(frozen=True)
class RequestedFit:
    """What a Trainer was given to fit."""

    task: Task
    data: DataSources
    start: StartFrom
    options: Options
    callbacks: Sequence[Callback]


class AroundFit:
    """What a command puts around the fits of a script: here, nothing that changes them."""

    def settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that the Trainer takes in place of the given ones."""
        return given

    def fit(self, requested: RequestedFit, train: Callable[[StartFrom], None]) -> None:
        """Do what `Trainer.fit` does; `train` trains to the end."""
        train(requested.start)


IN_FORCE: ContextVar[AroundFit | None] = ContextVar("around_fit", default=None)


def in_force() -> AroundFit | None:
    """Return what stands around the fits of a Trainer that is constructed now; None: nothing."""
    return IN_FORCE.get()
