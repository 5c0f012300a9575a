"""Synthetic recordings of ranks, with known times. Milliseconds in, files out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit.extensions.timeline.traces.pieces import (
    HOROVOD,
    MEETINGS,
    OWN,
    SUMMED,
    About,
    Event,
    TraceFile,
    span,
)

MS = 1_000_000  # nanoseconds
PARTS = {
    "data": 1.0,
    "forward": 10.0,
    "backward": 20.0,
    "communication": 4.0,
    "optimizer": 3.0,
    "hooks": 2.0,
}
ABOUT = About(
    0,
    1,
    "node0",
    "boot0",
    0,
    10**18,
    "horovod",
    samples=32,
    cycle_ms=1.0,
    fusion_bytes=2**27,
    workers=0,
)

# (rank, step) -> milliseconds by part; sums make ranks wait
PartsOf = Callable[[int, int], Mapping[str, float]]


def record(
    folder: Path,
    ranks: int = 1,
    steps: int = 6,
    parts_of: PartsOf = lambda rank, step: PARTS,
    about: About = ABOUT,
    gradients: Mapping[str, int] | None = None,
    skews_ms: Mapping[int, float] | None = None,
) -> Path:
    """Write the recording of steps 0, 1, ... in which ranks wait for each other; return its folder.

    Args:
        folder: where.
        ranks: how many.
        steps: how many.
        parts_of: how long each part of a rank's step takes; "communication" is what is left for the
            rank that is last.
        about: what they have in common.
        gradients: name -> bytes; handed over one after the other over backward, summed by Horovod
            in one operation at its end.
        skews_ms: of ranks on another host, what their clocks show more than rank 0's.
    """
    skews = skews_ms or {}
    mine = {
        rank: replace(
            about,
            rank=rank,
            world_size=ranks,
            boot=f"boot{rank if rank in skews else 0}",
            host=f"node{rank}",
        )
        for rank in range(ranks)
    }
    pieces = {rank: TraceFile(folder / OWN.format(rank), mine[rank]) for rank in range(ranks)}
    horovod: dict[int, list[Event]] = {rank: [] for rank in range(ranks)}
    shift = {rank: round(skews.get(rank, 0.0) * MS) for rank in range(ranks)}
    now = 1000 * MS
    for rank, piece in pieces.items():
        piece.add([_meetings(rank, now, shift[rank])])
    for step in range(steps):
        now = _write_step(pieces, horovod, step, now, parts_of, gradients or {}, shift)
    for rank, piece in pieces.items():
        piece.add([_meetings(rank, now, shift[rank])])
        piece.close()
        if gradients:
            (folder / HOROVOD.format(rank)).write_text(json.dumps(_head(gradients) + horovod[rank]))
    return folder


def _meetings(rank: int, now: int, shift: int) -> Event:
    times = [(now + i * MS + shift, now + i * MS + MS // 10 + shift) for i in range(4)]
    return {"name": MEETINGS, "ph": "M", "pid": rank, "tid": 0, "args": {"times": times}}


def _write_step(
    pieces: Mapping[int, TraceFile],
    horovod: dict[int, list[Event]],
    step: int,
    now: int,
    parts_of: PartsOf,
    gradients: Mapping[str, int],
    shift: Mapping[int, int],
) -> int:
    parts = {
        rank: {name: round(ms * MS) for name, ms in parts_of(rank, step).items()} for rank in pieces
    }
    ends = {
        rank: now + sum(own[p] for p in ("data", "forward", "backward"))
        for rank, own in parts.items()
    }
    summed = max(ends.values()) + max(own["communication"] for own in parts.values())
    after = summed + max(own["optimizer"] + own["hooks"] for own in parts.values())
    for rank, piece in pieces.items():
        at, events, own, moved = now, list[Event](), parts[rank], shift[rank]
        for name in ("data", "forward", "backward"):
            events.append(span(name, at + moved, at + own[name] + moved, rank, step=step))
            at += own[name]
        events.append(span("communication", at + moved, summed + moved, rank, step=step))
        events.append(
            span("optimizer", summed + moved, summed + own["optimizer"] + moved, rank, step=step)
        )
        events.append(
            span("hooks", summed + own["optimizer"] + moved, after + moved, rank, step=step)
        )
        events.append(span(f"step {step}", now + moved, after + moved, rank, step=step, samples=32))
        for i, (name, size) in enumerate(gradients.items()):
            handed = ends[rank] - own["backward"] + own["backward"] * (i + 1) // len(gradients)
            base: dict[str, Any] = {
                "cat": SUMMED,
                "name": name,
                "pid": rank,
                "tid": 0,
                "id": f"{rank}.{step}.{i}",
            }
            args = {"step": step, "bytes": size, "names": [name]}
            events.append(base | {"ph": "b", "ts": (handed + moved) / 1000, "args": args})
            events.append(base | {"ph": "e", "ts": (summed + moved) / 1000})
        piece.add(events)
        horovod[rank] += _operation(
            gradients, (max(ends.values()) + moved) / 1000, (summed + moved) / 1000
        )
    return after


def _head(gradients: Mapping[str, int]) -> list[Event]:
    times = {"start_time_since_epoch_in_micros": 0, "start_time_steady_in_micros": 0}
    names = [
        {
            "name": "process_name",
            "ph": "M",
            "pid": i,
            "args": {"name": f"allreduce.trainkit.grad.{name}"},
        }
        for i, name in enumerate(gradients, 1)
    ]
    return [{"name": "process_name", "ph": "M", "pid": 0, "args": times}, *names]


def _operation(gradients: Mapping[str, int], start: float, end: float) -> list[Event]:
    """Horovod's events of one fused allreduce:
    a tenth of the time in copies in, a tenth in copies out.
    """
    tenth, pids = (end - start) / 10, range(1, len(gradients) + 1)
    events: list[Event] = [
        {"ph": "B", "name": "ALLREDUCE", "ts": start, "pid": pid} for pid in pids
    ]
    for name, begun, ended in (
        ("MEMCPY_IN_FUSION_BUFFER", start, start + tenth),
        ("GLOO_ALLREDUCE", start + tenth, end - tenth),
        ("MEMCPY_OUT_FUSION_BUFFER", end - tenth, end),
    ):
        events += [{"ph": "B", "name": name, "ts": begun, "pid": pid} for pid in pids]
        events += [{"ph": "E", "ts": ended, "pid": pid} for pid in pids]
    for pid, size in zip(pids, gradients.values(), strict=True):
        events.append(
            {
                "ph": "E",
                "ts": end,
                "pid": pid,
                "args": {"dtype": "float32", "shape": f"[{size // 4}]"},
            }
        )
    return events
