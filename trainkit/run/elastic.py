"""Elastic training: a fit continues in its living processes when ranks die, leave or join.

    ElasticRun.go               attempts of one fit, until it is done
        fit                     each attempt is a fit like any other, from the engine's start on
            resume              from rank 0's memory (the process with the newest commit becomes rank 0); else from the newest
                                checkpoint of the run
            commit              every few steps all ranks copy a checkpoint's contents to host memory
            a rank is lost      a collective fails on the others: PeerError
            other ranks         the coordinator lets all ranks know at the same step: they commit, and raise RanksChanged

The plan of batch and rate is that of the run's beginning. A step keeps its samples, spread evenly
over the present ranks (data/plan.py), so each sample of an epoch counts once. (A stream cannot be
sharded again: each rank reads its own, and a message says so.)
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from trainkit.api.view import RunView
from trainkit.checkpoint.in_memory import Memory
from trainkit.checkpoint.stateful import packed_part
from trainkit.checkpoint.writer import Writer
from trainkit.engine.base import Engine
from trainkit.engine.collectives import PeerError
from trainkit.engine.gathering import Gathering
from trainkit.engine.ranks import RanksChanged
from trainkit.errors import EngineError, JobEnded
from trainkit.run.feature import Feature
from trainkit.run.kept import ReusedParts
from trainkit.run.signals import Signals

_MAX_FRUITLESS = 5  # recoveries without a step between them, after which an error is an error


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
    """

    def __init__(self, rehearse: Callable[[Any], None]) -> None:
        self.rehearse = rehearse
        self.memory, self.signals, self.writer = Memory(), Signals(), Writer()
        self.run_dir: Path | None = None
        self.facts: dict[str, dict[str, str]] = {}
        self.has_begun = self.is_rehearsed = False
        self.kept = ReusedParts()
        self._handling = contextlib.ExitStack()
        self._is_handling = False
        self._run: RunView | None = None

    @property
    def is_resumed_here(self) -> bool:
        """Whether an earlier attempt of this process set up the Task and its data."""
        return self.run_dir is not None

    def attach(self, run: RunView) -> None:
        """Commit this run from now on."""
        self._run = run
        self._gathering = Gathering(run.engine.comm)

    def begin(self) -> None:
        """Handle signals from here on, until the fit is done, and commit:
        a rank that has just joined can resume from here.
        """
        if not self._is_handling:
            self._handling.enter_context(self.signals)
            self._is_handling = True
        self.commit()

    def commit(self) -> None:
        """Copy a checkpoint's contents to host memory. Call it on all ranks.

        Ranks that step alone take an outer step first: the commit holds what all share, and any of
        them may be lost.
        """
        assert self._run is not None
        checkpoints, engine = self._run.checkpoints, self._run.engine
        engine.approximation.close_round()
        contents = checkpoints.contents
        with contents.saving() as extra:
            training = checkpoints.collect(extra, [])
            of_rank_0 = {name: training[name] for name in (*contents.rank_0_parts, "extra")}
            wait = self._gathering.start(
                packed_part(
                    checkpoints.committed_rank_parts(), of_rank_0 if engine.ranks.is_main else None
                )
            )
            weights = engine.model_state(contents.task)
            # before the copy: if a rank is lost here, the last commit is still whole
            ranks = wait()
            self.memory.keep(self._run.global_step, weights, training, ranks)

    def close(self) -> None:
        """End the handling of signals, and free the memory."""
        self._handling.close()
        self.kept.close()
        self.memory.forget()


class ElasticFit(Feature):
    """An attempt of an elastic fit: it commits to this process's memory."""

    name = "elastic"
    key = "callbacks=elastic"
    not_by_hand = "Start the job without --min-np and --host-discovery-script"
    not_split = (
        "the job is elastic: the part of a rank that is lost would be lost too. Start with"
        " torchrun, and let it resume from the checkpoint: torchrun --max-restarts 3, with"
        " resume=auto run_dir=runs/mine."
    )

    def __init__(self, state: ElasticState) -> None:
        self._state = state

    def begun(self, run: RunView) -> None:
        """Commit this run from now on."""
        self._state.attach(run)


class Attempt(Protocol):
    """One attempt, as setup.py's Stage is one."""

    engine: Engine

    @property
    def is_elastic(self) -> bool: ...
    @property
    def is_set_up(self) -> bool: ...

    def fail(self, error: BaseException) -> None:
        """End a fit that no later attempt continues."""


class ElasticRun:
    """The attempts of one fit.

    Args:
        rehearse: called with the first attempt of a worker that joins later, before it joins.

    Attributes:
        state: outlives an attempt.
        attempt: the latest one; open_stage sets it.
    """

    def __init__(self, rehearse: Callable[[Any], None]) -> None:
        self.state = ElasticState(rehearse)
        self.attempt: Attempt | None = None

    def go(self, fit: Callable[[ElasticRun], None]) -> None:
        """Fit, and again after each change of ranks; `fit` runs one attempt.

        Raises:
            EngineError: several attempts in a row took no step.
        """
        fruitless, last_step = 0, -1
        set_up: Attempt | None = None  # the last attempt that came as far
        try:
            while True:
                try:
                    fit(self)
                    break
                except (PeerError, RanksChanged) as change:
                    attempt = self.attempt
                    if attempt is None or not attempt.is_elastic:
                        raise
                    set_up = attempt if attempt.is_set_up else set_up
                    gained = self.state.memory.step > last_step or isinstance(change, RanksChanged)
                    fruitless = 0 if gained else fruitless + 1
                    if fruitless == _MAX_FRUITLESS:
                        raise EngineError(
                            f"The ranks were formed again {_MAX_FRUITLESS} times, and each time the"
                            f" run failed before it took a step after step {last_step}. The last"
                            f" time: {change}"
                        ) from change
                last_step = self.state.memory.step
                attempt.engine.ranks.leave()
                if attempt.engine.device.type == "cuda":
                    # torch's schedulers and optimizers refer to each other: free their memory for
                    # the next
                    gc.collect()
        except BaseException as error:
            is_own = isinstance(error, Exception) and not isinstance(
                error, (PeerError, RanksChanged, JobEnded)
            )
            if is_own and self.attempt is not None and self.attempt.is_set_up:
                self.attempt.engine.ranks.report_exception()
            if (
                set_up is not None
                and self.attempt is not None
                and (self.attempt is set_up or not self.attempt.is_set_up)
            ):
                set_up.fail(error)
            raise
        finally:
            self.state.close()
