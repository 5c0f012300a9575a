"""What can be asked of a Trainer, while something runs and after it: the names that Lightning's users know."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from trainkit.api.state import TrainState
from trainkit.engine.base import Engine
from trainkit.errors import ConfigError
from trainkit.optim.batch_plan import Contract
from trainkit.run.build import FitSession
from trainkit.run.options import Settings
from trainkit.run.setup import Session


class Running:
    """The read-only half of a Trainer."""

    settings: Settings
    _session: Session | None
    _fitted: FitSession | None

    @property
    def _running(self) -> Session:
        if self._session is None:
            raise ConfigError("The Trainer has not run yet: call fit, validate, test or predict first.")
        return self._session

    @property
    def _trained(self) -> FitSession:
        if self._fitted is None:
            raise ConfigError("There was no fit yet, so there is nothing trained: call fit first.")
        return self._fitted

    @property
    def state(self) -> TrainState:
        """The counters."""
        return self._running.state

    @property
    def engine(self) -> Engine:
        """The ranks."""
        return self._running.engine

    @property
    def run_dir(self) -> Path:
        """The run's folder, the same on all ranks."""
        if not self.engine.ranks.takes_part:
            raise ConfigError("trainer.run_dir: this rank is none of engine.process_set, and has no part in the run's files.")
        return self._running.run_dir

    @property
    def contract(self) -> Contract:
        """The arithmetic of batch and learning rate."""
        return self._running.contract if hasattr(self._running, "contract") else self._trained.contract

    @property
    def session(self) -> FitSession:
        """What runs now, for callbacks that show it. Outside of a fit it is a Session, without what fit alone has."""
        return cast(FitSession, self._running)

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self.state.global_step

    @property
    def current_epoch(self) -> int:
        """The epoch that is going on, from 0."""
        return self.state.current_epoch

    @property
    def max_epochs(self) -> int | None:
        """The limit of epochs."""
        return self.settings.limits.max_epochs

    @property
    def max_steps(self) -> int | None:
        """The limit of steps."""
        return self.settings.limits.max_steps

    @property
    def should_stop(self) -> bool:
        """Whether training ends after the current step."""
        return self.state.should_stop

    @property
    def sanity_checking(self) -> bool:
        """Whether the few validation batches before training run now."""
        return self.state.stage == "sanity_check"

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.engine.ranks.is_main

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.engine.ranks.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.engine.ranks.world_size

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the whole run, for schedules.

        Raises:
            ConfigError: nobody can know: the training data has no length, or time alone ends the run, and max_steps is not set.
        """
        steps = self.session.total_steps
        if steps is None:
            raise ConfigError(
                "The number of steps of the run is not known: the training data has no length, or trainer.max_time alone ends "
                "it. Set trainer.max_steps."
            )
        return steps
