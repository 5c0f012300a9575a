"""Loaders that are made again before each nth epoch (trainer.reload_dataloaders_every_n_epochs)."""

from __future__ import annotations

from trainkit.api.task import Task
from trainkit.data.shares import read_words
from trainkit.errors import ConfigError
from trainkit.run.data_sources import DataSources, read_training_data
from trainkit.run.feeds import Feeds, make_feeds, validation_data
from trainkit.run.norms import check_norms
from trainkit.run.replicas import Replicas
from trainkit.run.run import Run
from trainkit.run.setup import Stage


class Reload:
    """Calls train_dataloader and val_dataloader again. A run that resumes calls them for its epoch too.

    Args:
        feeds: made before training.

    Raises:
        ConfigError: the loaders were passed to fit, so there is nothing to call.
    """

    def __init__(self, stage: Stage, run: Run, feeds: Feeds) -> None:
        self._stage, self._run, self._feeds = stage, run, feeds
        self._every, self._turn = stage.options.samples.reload_dataloaders_every_n_epochs, 0
        _check(stage.data, stage.task, self._every)

    def __call__(self, epoch: int) -> None:
        """Make the data of an epoch, if it is due. Call it on all ranks.

        Raises:
            ConfigError: the batch size has changed: the contract of batch and rate holds for the whole run.
        """
        turn = epoch // self._every
        if turn == self._turn:
            return
        self._turn = turn
        stage, run, old = self._stage, self._run, self._feeds
        stage.feeds.drop([old.train, *old.val])
        data = read_training_data(stage.data, stage.task, stage.engine, Replicas(stage.engine.comm))
        new = make_feeds(stage, data, old.declared_ranks, read_words(run.batch_plan.rank_shares))
        if (new.batch_size, new.accumulation) != (old.batch_size, old.accumulation):
            raise ConfigError(
                f"trainer.reload_dataloaders_every_n_epochs is {self._every}, and in epoch {epoch} train_dataloader() returned "
                f"batches of {new.batch_size}; before, they were of {old.batch_size}. The rate and the schedule are meant for "
                "one batch size: keep it, and change accumulate_grad_batches by epoch instead, as {0: 1, 10: 2}."
            )
        check_norms(stage, new, run.batch_plan)
        self._feeds = new
        run.train_on(new.train, run.batch_plan)
        run.evaluator.data = validation_data(stage, new.val, new.val_data)


def _check(data: DataSources, task: Task, every: int) -> None:
    if data.datamodule is None and data.given.get("train") is not None:
        raise ConfigError(
            f"trainer.reload_dataloaders_every_n_epochs is {every}, but the loaders were passed to fit and cannot be made "
            f"again. Return them from train_dataloader() of a DataModule, or of {type(task).__name__}."
        )
