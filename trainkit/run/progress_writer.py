"""Writes progress.json (progress_file.py) from a thread of rank 0. The steps know nothing of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from trainkit.api.view import RunView, with_role
from trainkit.callbacks.checkpoint import checkpoint_policies
from trainkit.engine.collectives import PeerError
from trainkit.engine.ranks import RanksChanged
from trainkit.errors import Dismissed, summary
from trainkit.launch.environment import driver_address, is_rank_of_ray, job_started, read_launcher
from trainkit.launch.moments import Moment
from trainkit.launch.shared_folder import host_name
from trainkit.run.lock import birth
from trainkit.run.progress_file import (
    EVERY_S,
    MOST_STARTS,
    FitStart,
    Progress,
    read_progress,
    write_progress,
)
from trainkit.safety.masking import scrubbed
from trainkit.safety.threads import printed, start_thread

_WINDOW_S = 60.0  # of the rates
_LAST_WRITE_S = 5.0  # a network disk that hangs does not keep a run from ending


@contextlib.contextmanager
def writing_progress(run: RunView) -> Iterator[None]:
    """Keep progress.json up to date in this context, and let it say how the fit ended.
    Enter it on all ranks.
    """
    hosts = run.engine.comm.all_gather_object(host_name()) if run.world_size > 1 else [host_name()]
    if not run.is_global_zero or run.options.fast_dev_run:
        yield
        return
    writer = _Writer(run, hosts)
    writer.start()
    try:
        yield
    except BaseException as error:
        how = _how(error, run)
        writer.end(
            how, scrubbed(summary(error), run.options.masked_values) if how == "failed" else ""
        )
        raise
    writer.end("done", "")


def _how(error: BaseException, run: RunView) -> str:
    if isinstance(error, (RanksChanged, Dismissed)) or (
        isinstance(error, PeerError) and run.elastic is not None
    ):
        return "ranks changed"
    return "failed" if isinstance(error, Exception) else "stopped"


class _Writer:
    """Looks at the run's counters, which are numbers on the host, and writes the file."""

    def __init__(self, run: RunView, hosts: list[str]) -> None:
        self._run, self._over = run, threading.Event()
        self._looked = self._moved = time.monotonic()
        self._trained_s = 0.0  # without validations
        self._position: tuple[Any, ...] = ()
        self._marks: deque[tuple[float, int, int]] = deque()  # seconds of training, steps, samples
        # moment and step of the first look after a step
        self._first: tuple[float, int] | None = None
        self._begun_at = run.global_step
        self._progress = self._describe(hosts)

    def start(self) -> None:
        """Write the file, and again and again in a thread."""
        self._write()
        effect = "progress.json is written again; training continues."
        self._thread = start_thread("progress-file", self._work, printed(effect, retry_s=EVERY_S))

    def _work(self) -> None:
        while not self._over.wait(EVERY_S):
            self._write()

    def end(self, how: str, error: str) -> None:
        """Write the last state."""
        self._over.set()
        self._thread.join(_LAST_WRITE_S)
        if not self._thread.is_alive():
            self._progress = dataclasses.replace(self._progress, ended=how, error=error)
            self._write()

    def _describe(self, hosts: list[str]) -> Progress:
        run, by_host = self._run, dict[str, list[int]]()
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        before = read_progress(run.run_dir)
        checkpoints = run.checkpoints
        how = (
            "recovery"
            if checkpoints.resumed_from_memory
            else "resume"
            if checkpoints.resumed_from
            else "start"
        )
        is_same_job = before is not None and bool(job_started()) and before.job == job_started()
        continues = before is not None and (checkpoints.resumed_in_place or is_same_job)
        earlier, count = (
            (before.starts, before.num_starts) if before is not None and continues else ([], 0)
        )
        start = FitStart(time.time(), run.global_step, run.world_size, how)
        return Progress(
            written=Moment.now(),
            host=socket.gethostname(),
            pid=os.getpid(),
            birth=birth(os.getpid()),
            job=job_started(),
            task=type(run.task).__name__,
            engine=run.engine.name,
            launcher="ray" if is_rank_of_ray() else read_launcher().name,
            driver=driver_address(),
            hosts=by_host,
            total_steps=run.total_steps,
            max_epochs=run.options.limits.max_epochs,
            checkpoints=list(
                dict.fromkeys(
                    policy.store_of(run.run_dir).place
                    for policy in checkpoint_policies(run.callbacks)
                )
            ),
            starts=[*earlier, start][-MOST_STARTS:],
            num_starts=count + 1,
        )

    def _write(self) -> None:
        self._look()
        # the disk is full or gone: the code that needs it reports that
        with contextlib.suppress(OSError):
            write_progress(self._run.run_dir, self._progress)

    def _look(self) -> None:
        run, state, now = self._run, self._run.state, time.monotonic()
        phase = "training" if state.phase == "fit" else "validating"
        if phase == self._progress.phase == "training":
            self._trained_s += now - self._looked
        self._looked = now
        position = (phase, state.global_step, state.batch_idx, run.engine.heartbeat.progress)
        if position != self._position:
            self._position = position
            self._moved = now
        if state.global_step > self._begun_at and self._first is None:
            self._first = now, state.global_step
        steps_per_s, samples_per_s = self._rates(state.global_step, state.samples_seen)
        total, left = self._progress.total_steps, None
        if total is not None and self._first is not None and state.global_step > self._first[1]:
            left = (
                (total - state.global_step)
                * (now - self._first[0])
                / (state.global_step - self._first[1])
            )
        self._progress = dataclasses.replace(
            self._progress,
            written=Moment.now(),
            phase=phase,
            step=state.global_step,
            epoch=state.current_epoch,
            step_in_epoch=state.step_in_epoch,
            steps_in_epoch=run.train_feed.num_steps_in(state.current_epoch),
            samples=state.samples_seen,
            steps_per_s=steps_per_s,
            samples_per_s=samples_per_s,
            seconds_left=left,
            waiting_for=run.engine.heartbeat.waiting,
            still_s=now - self._moved,
            prometheus=next(
                (c.address for c in with_role(run.callbacks, "metrics_server") if c.address), ""
            ),
        )

    def _rates(self, step: int, samples: int) -> tuple[float | None, float | None]:
        """Return steps and samples per second of training."""
        if step > self._begun_at:  # the first step compiles, and starts loader workers
            self._marks.append((self._trained_s, step, samples))
        while len(self._marks) > 2 and self._trained_s - self._marks[0][0] > _WINDOW_S:
            self._marks.popleft()
        if (
            not self._marks
            or (seconds := self._trained_s - self._marks[0][0]) <= 0
            or step == self._marks[0][1]
        ):
            return None, None
        return (step - self._marks[0][1]) / seconds, (samples - self._marks[0][2]) / seconds
