"""Recording: one rank's part of a Timeline recording."""

from __future__ import annotations

import contextlib
import functools
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trainkit.api.view import RunView
from trainkit.console import warning
from trainkit.data.feed import MapFeed, StreamFeed
from trainkit.device.accelerator import is_accelerator, mark, name_of
from trainkit.engine.reduce.reducer import Summed
from trainkit.extensions.timeline.traces.pieces import (
    HOROVOD,
    MEETINGS,
    OWN,
    SUMMED,
    TORCH,
    About,
    Event,
    TraceFile,
    span,
)
from trainkit.launch.moments import boot_id

_MEETINGS = 8  # barriers that align the clocks; each reduces the error bound


class Recording:
    """Writes this rank's file during a recording. Created and finished on all ranks at the same
    step: both run collectives.

    Time runs from mark to mark; each mark names the part that ended there. If the disk fails, this
    rank's file ends, and nothing else.

    Attributes:
        updated: whether the update of the current step is done.
    """

    def __init__(self, trainer: RunView, folder: Path, torch_profiler: bool) -> None:
        self._trainer = trainer
        self._engine = trainer.engine
        self._rank = trainer.global_rank
        self._folder = folder
        self._before_step = "data" if isinstance(trainer.train_feed, StreamFeed) else "hooks"
        self._on_gpu = _computes_on_gpu(trainer)
        self._profiler: profile | None = None
        if torch_profiler and torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            trainer.say(
                "Timeline: no operators: torch's profiler is already running and cannot run twice."
            )
        elif torch_profiler:
            self._profiler = _profiler(self._on_gpu)
        lacks = trainer.engine.heartbeat.start_timeline(folder / HOROVOD.format(self._rank))
        if lacks:
            trainer.say(f"Timeline: the recording lacks {lacks}.")
        self._piece: TraceFile | None = None
        self._try(self._open)
        self._meet()
        self._marks: list[tuple[str, int]] = []
        self._events: list[tuple[str, int, torch.Event]] = []
        self._step = -1
        self.updated = False
        self._has_sums = False
        self._samples = trainer.state.samples_seen
        self._ready: dict[str, Summed] = {}
        self._hooks = self._hook_parameters() if trainer.world_size == 1 else []
        if self._on_gpu:
            torch.accelerator.synchronize()
            self._zero = mark(timed=True)
            self._zero.synchronize()
        self._last = self._zero_ns = time.perf_counter_ns()

    def _open(self) -> None:
        self._piece = TraceFile(self._folder / OWN.format(self._rank), _about(self._trainer))

    def begin_step(self) -> None:
        """Start a step."""
        self._step = self._trainer.global_step
        self.updated = False
        self._has_sums = False
        self._epoch = self._trainer.current_epoch
        self._last = time.perf_counter_ns()
        if self._on_gpu:
            self._events.append(("", self._step, mark(timed=True)))

    def mark(self, ended: str) -> None:
        """Mark the end of "data", "forward", "backward", "communication", "optimizer" or "hooks";
        or of a rare part outside of steps: "validation", "epoch end"."""
        self._marks.append((ended, time.perf_counter_ns()))
        self.updated = self.updated or ended == "optimizer"
        if self._on_gpu:
            self._events.append((ended, self._step, mark(timed=True)))

    def mark_sums(self) -> None:
        """Mark the gradients of the whole step as reduced;
        unscaling and clipping count as the optimizer's.
        """
        if self._has_sums:  # the first of several optimizers has marked it
            return
        self._has_sums = True
        fetched = self._trainer.train_feed.fetching.ended_ns  # the next step's batch
        if fetched > self._last:
            self._marks.append(("data", fetched))
        summed = self._engine.heartbeat.take_summed() or list(self._ready.values())
        if summed and not self._hooks:
            self._marks.append(("communication", max(s.done_ns for s in summed)))
        self.mark("optimizer" if summed or self._engine.ranks.world_size == 1 else "communication")
        self.updated = False
        events: list[Event] = []
        for i, one in enumerate(summed):
            name = (
                one.names[0]
                if len(one.names) == 1
                else f"{one.names[0]} and {len(one.names) - 1} more"
            )
            base = {
                "cat": SUMMED,
                "name": name,
                "pid": self._rank,
                "tid": 0,
                "id": f"{self._rank}.{self._step}.{i}",
            }
            args = {"step": self._step, "bytes": one.num_bytes, "names": one.names}
            events.append(base | {"ph": "b", "ts": one.handed_ns / 1000, "args": args})
            events.append(base | {"ph": "e", "ts": one.done_ns / 1000})
        self._write(events)

    def _hook_parameters(self) -> list[Any]:
        """With one rank, record when each gradient is ready:
        `trainkit scaling` predicts the cost of reductions from that.
        """

        def note(name: str, parameter: torch.nn.Parameter) -> None:
            now = time.perf_counter_ns()
            self._ready[name] = Summed(
                (name,), parameter.numel() * parameter.element_size(), now, now
            )

        trained = [
            (name, p) for name, p in self._trainer.task.named_parameters() if p.requires_grad
        ]
        return [
            p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(note, name)
            )
            for name, p in trained
        ]

    def end_step(self, is_last: bool = False) -> None:
        """End a step, with the time between it and the next one;
        the work at an epoch's end is not part of it.
        """
        self.mark(
            "epoch end"
            if is_last or self._trainer.current_epoch != self._epoch
            else self._before_step
        )
        began = self._last
        self._last = self._marks[-1][1]
        samples = self._trainer.state.samples_seen
        taken = samples - self._samples
        self._samples = samples
        events = [
            span(
                f"step {self._step}", began, self._last, self._rank, step=self._step, samples=taken
            )
        ]
        for name, at in self._marks:
            if at > began:
                events.append(span(name, began, at, self._rank, step=self._step))
                began = at
        self._marks.clear()
        self._write(events)

    def finish(self) -> bool:
        """End the recording on all ranks; return whether this rank's file is complete."""
        self._meet()
        self._engine.heartbeat.stop_timeline()
        self._stop_profiler(keep=True)
        self._write(self._by_device())
        is_written = self._piece is not None
        self._try(self._close)
        self._engine.comm.barrier()  # all files are written
        return is_written

    def abandon(self) -> None:
        """End the recording on this rank alone: other ranks may have exited."""
        self._engine.heartbeat.stop_timeline()
        self._stop_profiler(keep=False)
        self._try(self._close)

    def _close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._piece is not None:
            self._piece.close()
            self._piece = None

    def _stop_profiler(self, keep: bool) -> None:
        if self._profiler is not None:
            profiler = self._profiler
            self._profiler = None
            try:
                profiler.stop()
                if keep:
                    self._try(
                        lambda: profiler.export_chrome_trace(
                            str(self._folder / TORCH.format(self._rank))
                        )
                    )
            except RuntimeError as error:  # another profiler was started meanwhile
                warning(f"Timeline: rank {self._rank} lacks torch's operators: {error}")

    def _meet(self) -> None:
        """Run barriers on all ranks, to align their clocks."""
        times = []
        for _ in range(_MEETINGS if self._engine.ranks.world_size > 1 else 0):
            came = time.perf_counter_ns()
            self._engine.comm.barrier()
            times.append((came, time.perf_counter_ns()))
        self._write(
            [{"name": MEETINGS, "ph": "M", "pid": self._rank, "tid": 0, "args": {"times": times}}]
        )

    def _by_device(self) -> list[Event]:
        if not self._on_gpu:
            return []
        torch.accelerator.synchronize()
        events = []
        began = 0
        for name, step, event in self._events:
            at = self._zero_ns + round(self._zero.elapsed_time(event) * 1e6)
            if name:
                events.append(span(name, began, at, self._rank, 1, step=step))
            began = at
        return events

    def _write(self, events: list[Event]) -> None:
        if self._piece is not None:
            piece = self._piece
            self._try(lambda: piece.add(events))

    def _try(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except OSError as error:
            piece = self._piece
            self._piece = None
            with contextlib.suppress(OSError):
                if piece is not None:
                    piece.drop()
            warning(
                f"Timeline: rank {self._rank} cannot write into {self._folder}: {error}. Its"
                " recording ends here."
            )


def _about(trainer: RunView) -> About:
    engine = trainer.engine
    contract = trainer.batch_plan
    feed = trainer.train_feed
    return About(
        rank=engine.ranks.rank,
        world_size=engine.ranks.world_size,
        host=platform.node(),
        boot=boot_id() or platform.node(),
        monotonic_ns=time.perf_counter_ns(),
        unix_ns=time.time_ns(),
        engine=engine.name,
        device=name_of(engine.device) if _computes_on_gpu(trainer) else "cpu",
        samples=contract.global_batch_size or 0,
        accumulate=contract.at(trainer.current_epoch).accumulate,
        workers=(
            int(feed.source.options.get("num_workers", -1)) if isinstance(feed, MapFeed) else -1
        ),
        rank_shares=contract.rank_shares,
        **engine.heartbeat.sum_settings,
    )


def _computes_on_gpu(trainer: RunView) -> bool:
    return is_accelerator(trainer.engine.device)


def _profiler(on_gpu: bool) -> profile:
    profiler = profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
        acc_events=False,
    )
    profiler.start()
    return profiler
