"""State of a fit that continues in its living processes when ranks die, leave or join: what outlives
an attempt, and its commits. The extension that brings the callback makes the attempts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from trainkit.api.view import RunView
from trainkit.checkpoint.contents import TRAINED
from trainkit.checkpoint.in_memory import Memory
from trainkit.checkpoint.stateful import own_parts, packed_part
from trainkit.checkpoint.writer import Writer
from trainkit.engine.base import Engine
from trainkit.engine.gathering import Gathering
from trainkit.engine.signals import Signals
from trainkit.run.feature import Feature
from trainkit.run.reused import ReusedParts


class Attempt(Protocol):
    """One attempt, as setup.py's Stage is one."""

    engine: Engine

    @property
    def is_elastic(self) -> bool: ...
    @property
    def is_set_up(self) -> bool: ...

    def fail(self, error: BaseException) -> None:
        """End a fit that no later attempt continues."""


class ElasticState:
    """State of this process that outlives an attempt, and the commits of the current one.

    Attributes:
        memory: the last commit.
        run_dir: the run's folder, once this process has been in it.
        signals: that this process received; handled from the first step on, also while ranks are
            formed again.
        writer: of checkpoints, which may still be writing when an attempt ends.
        has_begun: whether an attempt has begun in this process.
        is_rehearsed: whether it set up the Task and its data before the others had to wait for it.
        kept: what is made once.
        rehearse: does what a worker that joins later can do before it joins.
        facts: what this process compared with the other ranks before its first step.
        attempt: the latest one; its Stage sets it.
    """

    def __init__(self, rehearse: Callable[[Any], None]) -> None:
        self.rehearse = rehearse
        self.memory, self.signals, self.writer = Memory(), Signals(), Writer()
        self.run_dir: Path | None = None
        self.attempt: Attempt | None = None
        self.facts: dict[str, dict[str, str]] = {}
        self.has_begun = self.is_rehearsed = False
        self.reused = ReusedParts()
        self._handling = contextlib.ExitStack()
        self._is_handling = False
        self._run: RunView | None = None
        self._holds = False

    @property
    def is_resumed_here(self) -> bool:
        """Whether an earlier attempt of this process set up the Task and its data."""
        return self.run_dir is not None

    def attach(self, run: RunView) -> None:
        """Commit this run from now on."""
        self._run = run
        self._holds = run.engine.comm.outlives_ranks
        self._gathering = Gathering(run.engine.comm)

    def begin(self, commits: bool = True) -> None:
        """Handle signals from here on, until the fit is done, and commit:
        a rank that has just joined can resume from here.

        Args:
            commits: false if what a lost rank needs is held elsewhere.
        """
        if not self._is_handling:
            self._handling.enter_context(self.signals)
            self._is_handling = True
        if commits:
            self.commit()

    def commit(self) -> None:
        """Copy a checkpoint's contents to host memory. Call it on all ranks.

        Ranks that step alone take an outer step first: the commit holds what all share, and any of
        them may be lost.
        """
        assert self._run is not None
        self._run.engine.approximation.close_round()
        self._gather_to(self.memory.keep)

    def hold(self) -> None:
        """Note what a commit of this step would copy: the copy is made if a rank is lost before the
        weights change again. Call it on all ranks, after a step without a commit.

        Nothing is noted where a checkpoint holds other weights than those that train (as averages).
        """
        assert self._run is not None
        self._holds = self._holds and TRAINED not in self._run.checkpoints.contents.parts
        if self._holds:
            self._gather_to(self.memory.hold)
            self._holds = self.memory.can_settle

    def settle(self) -> None:
        """Commit the last step, if it is noted and no later one has changed a weight: a rank is lost."""
        run = self._run
        if run is not None and not run.state.half_updated:
            self.memory.settle(run.state.global_step)

    def _gather_to(self, keep: Callable[..., None]) -> None:
        assert self._run is not None
        checkpoints, engine = self._run.checkpoints, self._run.engine
        contents = checkpoints.contents
        with contents.saving() as handed:
            extra, _ = handed.split()  # weights stay as they are: they do not leave the job
            training = checkpoints.collect(extra, [])
            of_rank_0 = {name: training[name] for name in (*contents.rank_0_parts, "extra")}
            of_rank_0 = own_parts(of_rank_0)
            wait = self._gathering.start(
                packed_part(
                    checkpoints.committed_rank_parts(), of_rank_0 if engine.ranks.is_main else None
                )
            )
            weights = engine.model_state(contents.task)
            # before the copy: if a rank is lost here, the last commit is still whole
            ranks = engine.comm.all_or_none(wait)[:: engine.ranks.model_size]
            keep(self._run.global_step, weights, training, ranks)

    def close(self) -> None:
        """End the handling of signals, and free the memory."""
        self._handling.close()
        self.reused.close()
        self.memory.forget()


class ElasticFit(Feature):
    """An attempt of an elastic fit: it commits to this process's memory."""

    name = "elastic"
    key = "callbacks=elastic"
    not_by_hand = "Start the job without --min-np and --host-discovery-script"
    not_split = (
        "the job is elastic: the part of a rank that is lost would be lost too. Use engine=fsdp"
        " engine.replicas=2, or start with torchrun, and let it resume from the checkpoint: torchrun"
        " --max-restarts 3, with resume=auto run_dir=runs/mine."
    )

    def __init__(self, state: ElasticState, outlives_ranks: bool = False) -> None:
        self._state = state
        if outlives_ranks:  # another rank has each part
            self.not_split = ""

    def begun(self, run: RunView) -> None:
        """Commit this run from now on."""
        self._state.attach(run)
