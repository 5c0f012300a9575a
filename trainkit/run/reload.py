"""Loaders that are made again before each nth epoch (trainer.reload_dataloaders_every_n_epochs)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.api.view import RunView
from trainkit.data.shares import parse_shares
from trainkit.errors import ConfigError
from trainkit.run.data_sources import read_training_data
from trainkit.run.feature import Feature, Features
from trainkit.run.feeds import make_feeds
from trainkit.run.replicas import Replicas
from trainkit.run.setup import Stage


def epoch_of_loaders(stage: Stage, saved: Mapping[str, Any] | None) -> int:
    """Return the epoch in which a run that never stopped has made the loaders that come first."""
    every = stage.options.samples.reload_dataloaders_every_n_epochs
    if saved is None or not every:
        return 0
    epoch: int = saved["state"]["current_epoch"]
    return epoch // every * every


class Reload(Feature):
    """Calls train_dataloader and val_dataloader again. A run that resumes calls them for its epoch
    too.

    Args:
        features: of the fit, which check the new data.
    """

    name = "trainer.reload_dataloaders_every_n_epochs"

    def __init__(self, stage: Stage, features: Features) -> None:
        self._stage = stage
        self._features = features
        self._every = stage.options.samples.reload_dataloaders_every_n_epochs
        self._turn = 0

    def data_read(self, run: RunView) -> None:
        """Refuse loaders that cannot be made again.

        Raises:
            ConfigError: they were passed to fit, so there is nothing to call.
        """
        self._turn = run.current_epoch // self._every
        data = self._stage.data
        if data.datamodule is None and data.given.get("train") is not None:
            raise ConfigError(
                f"trainer.reload_dataloaders_every_n_epochs is {self._every}, but the loaders were"
                " passed to fit and cannot be made again. Return them from train_dataloader() of a"
                f" DataModule, or of {type(self._stage.task).__name__}."
            )

    def before_epoch(self, epoch: int) -> None:
        """Make the data of an epoch, if it is due. Call it on all ranks.

        Raises:
            ConfigError: the batch size has changed: the contract of batch and rate holds for the
                whole run.
        """
        if epoch // self._every == self._turn:
            return
        stage, run, old = self._stage, self._stage.run, self._stage.feeds.of_fit
        stage.feeds.drop([old.train, *old.val])
        data = read_training_data(stage.data, stage.task, stage.engine, Replicas(stage.engine.comm))
        new = make_feeds(stage, data, parse_shares(run.batch_plan.rank_shares))
        if (new.batch_size, new.accumulation) != (old.batch_size, old.accumulation):
            raise ConfigError(
                f"trainer.reload_dataloaders_every_n_epochs is {self._every}, and in epoch {epoch}"
                f" train_dataloader() returned batches of {new.batch_size}; before, they were of"
                f" {old.batch_size}. The rate and the schedule are meant for one batch size: keep"
                " it, and change accumulate_grad_batches by epoch instead, as {0: 1, 10: 2}."
            )
        run.train_on(new.train, run.batch_plan)
        self._features.data_read(run)
