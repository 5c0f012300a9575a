"""Elastic training: a fit continues in its living processes when ranks die, leave or join.

    ElasticRun.go               attempts of one fit, until it is done
        fit                     each attempt is a fit like any other, from the engine's start on
            resume              from rank 0's memory (the process with the newest commit becomes rank 0); else from the newest
                                checkpoint of the run
            commit              every few steps all ranks copy a checkpoint's contents to host memory
            a rank is lost      a collective fails on the others: PeerError
            other ranks         the coordinator lets all ranks know at the same step: they commit, and raise RanksChanged
            a loader worker     was killed (by the system, for memory): its rank ends, and is lost to the others, since that
                                error comes at any line; another error would come again, and ends the job

The plan of batch and rate is that of the run's beginning. A step keeps its samples, spread evenly
over the present ranks (data/plan.py), so each sample of an epoch counts once. (A stream cannot be
sharded again: each rank reads its own, and a message says so.)
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

from trainkit.device.accelerator import empty_cache, is_accelerator
from trainkit.engine.collectives import PeerError
from trainkit.engine.ranks import RanksChanged
from trainkit.errors import Dismissed, EngineError, JobEnded, Preempted
from trainkit.run.elastic import Attempt, ElasticState

# what torch says if SIGCHLD comes first, and if the rank waits for the worker's next batch
_KILLED_LOADER = re.compile(
    r"^DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (is killed by signal: [^.]+|exited unexpectedly)"
)
_MAX_FRUITLESS = 5  # recoveries without a step between them, after which an error is an error


class ElasticRun:
    """The attempts of one fit.

    Args:
        rehearse: called with the first attempt of a worker that joins later, before it joins.

    Attributes:
        state: outlives an attempt.
    """

    def __init__(self, rehearse: Callable[[Any], None]) -> None:
        self.state = ElasticState(rehearse)

    def go(self, fit: Callable[[ElasticState], None]) -> None:
        """Fit, and again after each change of ranks; `fit` runs one attempt.

        Raises:
            EngineError: several attempts in a row took no step.
        """
        try:
            self._attempt(fit)
        except RuntimeError as error:
            latest = self.state.attempt
            loader_end = killed_loader(error)
            if loader_end and latest is not None and latest.is_elastic:
                end_as_lost(loader_end)
            raise

    def _attempt(self, fit: Callable[[ElasticState], None]) -> None:
        fruitless = 0
        last_step = -1
        set_up: Attempt | None = None  # the last attempt that came as far
        try:
            while True:
                try:
                    fit(self.state)
                    break
                except (PeerError, RanksChanged, RuntimeError) as change:
                    attempt = self.state.attempt
                    if attempt is None or not attempt.is_elastic:
                        raise
                    is_lost = attempt.engine.comm.is_loss(change)
                    if not is_lost and not isinstance(change, RanksChanged):
                        raise
                    if is_lost:
                        self.state.settle()
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
                if is_lost:  # a sum may still wait here, or another rank for this one
                    attempt.engine.comm.abort()
                attempt.engine.comm.disconnect()
                if is_accelerator(attempt.engine.device):
                    # torch's schedulers and optimizers refer to each other: free their memory for
                    # the next, and give it to NCCL, which allocates beside torch's cache
                    gc.collect()
                    empty_cache(attempt.engine.device)
        except BaseException as error:
            latest = self.state.attempt
            if is_own(error) and latest is not None and latest.is_set_up:
                latest.engine.ranks.report_exception()
            if (
                set_up is not None
                and latest is not None
                and (latest is set_up or not latest.is_set_up)
            ):
                set_up.fail(error)
            raise
        finally:
            self.state.close()


def is_own(error: BaseException) -> bool:
    """Return whether a rank fails by the code that it runs, so that another worker in its place
    would too: an exception, or sys.exit with a code.
    """
    if isinstance(error, SystemExit):
        return not isinstance(error, (Preempted, Dismissed)) and error.code not in (None, 0)
    consequences = (PeerError, RanksChanged, JobEnded)
    return (
        isinstance(error, Exception)
        and not isinstance(error, consequences)
        and not killed_loader(error)
    )


def killed_loader(error: BaseException) -> str:
    """Return how a worker process of a DataLoader ended, in torch's words, if the error says that
    one did; else "". An exception that a dataset raises is none: the worker hands it on.
    """
    match = _KILLED_LOADER.search(str(error)) if isinstance(error, RuntimeError) else None
    return match[1] if match else ""


def end_as_lost(how: str) -> None:
    """End this process as if it had been killed: the driver replaces it, and the others continue."""
    print(
        f"A loader worker {how}: its rank ends, the others continue without it, and it is replaced."
        " If that repeats, the host may lack memory: fewer workers need less.",
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGKILL)
