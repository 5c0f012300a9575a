"""Elastic: a run continues in its living processes when ranks die, leave or join."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.arguments import NonNegativeInt, PositiveInt, checked
from trainkit.extensions.elastic.attempts import ElasticRun
from trainkit.extensions.elastic.copies.policy import Copies, announce
from trainkit.extensions.elastic.rehearsal import rehearse
from trainkit.loop import warm_up
from trainkit.run.elastic import ElasticState


@checked
class Elastic(Callback):
    """Commits the run's state to the memory of each process, so that it survives the loss of other
    ranks.

    In a job that an elastic horovodrun started (`--min-np`, `--host-discovery-script`) the living
    processes resume from the last commit, with the ranks there are then. Elsewhere nothing is
    committed, and a run that is started again, at any number of ranks, resumes from its checkpoint.
    In both cases the samples of a step, the learning rate and the schedule stay those of the run's
    beginning, and each sample of an epoch counts once. Streams (iterables) cannot be split again: a
    step takes nearly as many of their batches, and samples of the epoch in which ranks change may
    be left out or come again; a message says so.

    A process that joins later starts the script from its top: an elastic script has one fit, and
    begins with it. After each change all ranks repeat the beginning of the fit:
    configure_optimizers, dataloaders, hooks from on_fit_start to on_train_start, and `setup` of
    callbacks. `setup` of the Task and the DataModule, and prepare_data, are called once a process.
    Attributes of the Task are not restored, as with a checkpoint: clear a list that a validation
    gathers in on_validation_start.

    With engine=fsdp and replicas, a step is noted without a copy of the weights: the copy is made if
    a rank is lost before they change again, so that no step is lost. on_save_checkpoint is called
    after each step for it.

    Ranks that step alone (communication=diloco, local_sgd) commit at their outer steps only: the
    loss of a rank costs the steps since the last one, which the others take again from there, each
    with the optimizer state of the committed rank 0.

    Args:
        commit_every_n_steps: steps between two commits; the loss of a rank costs at most as many. A
            commit copies weights and optimizer state to host memory, and gathers each rank's random
            numbers and epoch means.
        copies: hosts that hold a copy of each rank's part of weights and optimizer state (engine=fsdp
            without replicas) in their memory, sent to them in place of a commit: if ranks are lost, all
            are replaced, and resume from there. 0 for none.
    """

    role = "elastic"
    needs_of_engine = frozenset({"whole_state"})
    runs_last = True  # a commit includes the effects of the other callbacks' and the Task's hooks

    def __init__(self, commit_every_n_steps: PositiveInt = 10, copies: NonNegativeInt = 0) -> None:
        self.commit_every_n_steps = commit_every_n_steps
        self.copies = copies
        self._committed = 0
        self._copies: Copies | None = None

    def fit(self, fit_once: Callable[[ElasticState], None]) -> None:
        """Fit, and again after each change of ranks; `fit_once` runs one attempt."""
        if self.copies:
            announce(self.copies)
        ElasticRun(partial(rehearse, first_step=warm_up)).go(fit_once)

    def setup(self, trainer: RunView, task: Task, stage: str) -> None:
        """Find the copies that the run may resume from, and who holds those to come."""
        if self.copies and trainer.elastic is not None:
            self._copies = Copies(trainer, self.copies, self.commit_every_n_steps)

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Commit: also a rank that has just joined can resume from here."""
        trainer.engine.heartbeat.step = self._committed = trainer.global_step
        if trainer.elastic is not None:
            trainer.elastic.begin(commits=self._copies is None)
        if self._copies is not None:
            self._copies.begin()
        if trainer.engine.launcher.name == "mpirun":
            trainer.say(
                "Elastic is off: ranks of MPI cannot be replaced. If one is lost, the job ends;"
                " started again, at any number of ranks, the run resumes from its checkpoint"
                " (resume=auto). horovodrun --min-np 1 starts an elastic job."
            )
        elif trainer.engine.launcher.name == "horovodrun" and trainer.elastic is None:
            trainer.say(
                "Elastic is off: horovodrun was started without --min-np, and the job ends if a rank is"
                " lost. Add --min-np 1, or leave callbacks=elastic out."
            )

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        """Commit every few steps, and report progress to the launcher."""
        here = trainer.engine.heartbeat
        here.step = trainer.global_step
        here.progress += 1
        step, every = trainer.global_step, self.commit_every_n_steps
        if self._copies is not None:
            self._copies.copy_if_due()
        elif (
            trainer.elastic is not None
            and step // every > self._committed // every
            and trainer.engine.approximation.has_met
        ):
            self._committed = step
            trainer.elastic.commit()
        elif trainer.elastic is not None:
            trainer.elastic.hold()

    def on_train_end(self, trainer: RunView, task: Task) -> None:
        """Wait for the last copy: the copy servers end with the job."""
        if self._copies is not None:
            self._copies.wait()

    def teardown(self, trainer: RunView, task: Task, stage: str) -> None:
        """Free what the run resumed from."""
        if self._copies is not None:
            self._copies.store.release()
            self._copies = None
