"""Elastic: a run goes on in its living processes when ranks die, leave or come."""

from __future__ import annotations

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import PositiveInt, checked


@checked
class Elastic(Callback):
    """Keeps what a checkpoint would hold in the memory of each process, so that a run survives the loss of others.

    Started by an elastic horovodrun (`--min-np`, `--host-discovery-script`), the processes that live go on from the last
    commit, with the ranks that there are then. Elsewhere nothing is kept in memory, and a run that is started again, at
    whatever number of ranks, goes on from its checkpoint.

    In both cases the samples of a step, the learning rate and the schedule stay those of the run's beginning, and each sample
    of an epoch counts once. Streams (iterables) cannot be dealt anew: a step takes nearly as many of their batches, and of the
    epoch in which ranks change samples may be left out or come again; it is told.

    A process that comes later starts the script from its top: an elastic script has one fit, and begins with it.

    After each change a fit's beginning is gone through again on all ranks: configure_optimizers, dataloaders, and hooks from
    on_fit_start to on_train_start, and `setup` of callbacks. `setup` of the Task and the DataModule, and prepare_data, are
    called once a process. What the Task keeps in attributes of its own is not put back, as with a checkpoint: what a validation
    gathers in a list is to be cleared in on_validation_start.

    Args:
        commit_every_n_steps: steps between two commits: what is lost with a rank, at most. A commit costs a copy of weights
            and optimizer state into host memory, and one gathering of each rank's random numbers and epoch means.
    """

    runs_last = True  # it keeps what the others, and the Task's own hooks, did

    def __init__(self, commit_every_n_steps: PositiveInt = 10) -> None:
        self.commit_every_n_steps = commit_every_n_steps

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Commit: also a rank that has just joined can resume from here."""
        trainer.engine.heartbeat.step = trainer.global_step
        if trainer.elastic is not None:
            trainer.elastic.begin()

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        """Commit every few steps, and report progress to the launcher."""
        here = trainer.engine.heartbeat
        here.step = trainer.global_step
        here.progress += 1
        if trainer.elastic is not None and trainer.global_step % self.commit_every_n_steps == 0:
            trainer.elastic.commit()
