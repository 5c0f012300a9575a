"""Merges the files of a recording into one that Perfetto (ui.perfetto.dev) and chrome://tracing
open.

Ranks are processes. Each has a track of its steps and their parts, on a GPU a second one by the
device's clock, a track of Horovod's operations, tracks of the gradients from the time they were
submitted, and the tracks of torch's profiler. All times are by rank 0's clock; see clocks.py.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.errors import TrainkitError
from trainkit.extensions.timeline.traces.clocks import SAME, Alignment, Meeting, Offset, offset
from trainkit.extensions.timeline.traces.horovod_file import Operation, read_operations
from trainkit.extensions.timeline.traces.pieces import (
    FOLDER,
    HOROVOD,
    MEETINGS,
    OWN,
    TORCH,
    WHOLE,
    About,
    Event,
    about_of,
    own_events,
    read_events,
    read_head,
)
from trainkit.safety.whole_files import replacing

_HOROVOD_TRACK = 2
_TORCH_TRACKS = 1_000_000
_GPU_TRACKS = 2_000_000
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_sync")


class TraceError(TrainkitError):
    """There is no recording, or no readable one."""

    exit_code = 2


@dataclass
class RankTrace:
    """One rank's part of a recording, by its own clock, with its alignment to rank 0's."""

    about: About  # facts about the rank
    events: list[Event]  # its own events: parts of steps, gradients
    # operations of its Horovod timeline; empty if there is none
    operations: list[Operation] = field(default_factory=list)
    torch_path: Path | None = None  # the file of torch's profiler, or None
    clock: Alignment = field(default_factory=Alignment)  # its alignment
    is_aligned: bool = True  # False if its clock could not be compared with rank 0's


def recordings(run_dir: Path) -> list[Path]:
    """Return the folders of a run's recordings, newest last."""
    folders = {path.parent for path in (run_dir / FOLDER).glob(f"*/{OWN.format('*')}")}
    return sorted(folders, key=lambda folder: folder.stat().st_mtime)


def read_recording(folder: Path) -> list[RankTrace]:
    """Read the files of all ranks, in the order of ranks.

    Raises:
        TraceError: no file can be read.
    """
    ranks = []
    for path in folder.glob(OWN.format("*")):
        events = read_events(path)
        about = about_of(events)
        if about is not None:
            ranks.append(RankTrace(about, list(own_events(events))))
    if not ranks:
        raise TraceError(
            f"{folder} holds no readable recording: no file {OWN.format(0)}. Record steps with"
            " callbacks=timeline, or ask a running job: python -m trainkit timeline RUN_DIR"
            " record=10"
        )
    ranks.sort(key=lambda rank: rank.about.rank)
    for rank in ranks:
        number = rank.about.rank
        if (path := folder / HOROVOD.format(number)).is_file():
            rank.operations = read_operations(read_events(path))
        if (path := folder / TORCH.format(number)).is_file():
            rank.torch_path = path
        _align(ranks[0], rank)
    return ranks


def _align(first: RankTrace, rank: RankTrace) -> None:
    if rank.about.boot == first.about.boot:
        return
    own, others = _meetings(rank), _meetings(first)
    offsets = [
        o
        for mine, theirs in zip(own, others, strict=False)
        if (o := offset(theirs, mine)) is not None
    ]
    rank.is_aligned = bool(offsets)
    if not offsets:  # use the time of day: under NTP, hosts differ by milliseconds
        about = rank.about
        zero = first.about
        shift = (about.unix_ns - about.monotonic_ns) - (zero.unix_ns - zero.monotonic_ns)
        offsets = [Offset(shift, float("inf"), about.monotonic_ns)]
    rank.clock = Alignment(offsets[0], offsets[-1])


def _meetings(rank: RankTrace) -> list[list[Meeting]]:
    return [
        [(came, left) for came, left in e["args"]["times"]]
        for e in rank.events
        if e.get("name") == MEETINGS
    ]


def write_whole(folder: Path) -> Path:
    """Write the merged file atomically; return its path."""
    ranks = read_recording(folder)
    path = folder / WHOLE
    with replacing(path) as draft:
        _write(draft, ranks)
    return path


def _write(path: Path, ranks: list[RankTrace]) -> None:
    with gzip.open(path, "wt", compresslevel=3) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        begin = min((_first(rank) for rank in ranks), default=0.0)
        before = "\n"
        for event in whole(ranks):
            if "ts" in event:
                event["ts"] = round(event["ts"] - begin, 3)
                # torch's profiler began earlier; Perfetto accepts no negative time
                if event["ts"] < 0:
                    continue
            file.write(before + json.dumps(event, separators=(",", ":")))
            before = ",\n"
        file.write("\n]}\n")


def _first(rank: RankTrace) -> float:
    return min(
        (rank.clock.to_rank_0(event["ts"]) for event in rank.events if "ts" in event), default=0.0
    )


def whole(ranks: Iterable[RankTrace]) -> Iterator[Event]:
    """Yield the events of all ranks, by rank 0's clock, in microseconds."""
    for rank in ranks:
        number = rank.about.rank
        about = rank.about
        unsure = (
            f", clock +- {rank.clock.error_us / 1000:.2g} ms"
            if rank.clock != Alignment(SAME, SAME)
            else ""
        )
        yield _label(
            "process_name", number, name=f"rank {number} on {about.host} ({about.device}{unsure})"
        )
        yield _label("process_sort_index", number, sort_index=number)
        yield _label("thread_name", number, 0, name="steps")
        yield _label("thread_sort_index", number, 0, sort_index=-3)
        if any(event.get("tid") == 1 for event in rank.events):
            yield _label("thread_name", number, 1, name="steps, by the device")
            yield _label("thread_sort_index", number, 1, sort_index=-2)
        for event in rank.events:
            if "ts" in event:
                moved = event | {"ts": rank.clock.to_rank_0(event["ts"])}
                # a track of this process
                yield moved if "id" not in moved else moved | {"id2": {"local": moved.pop("id")}}
        yield from _horovod(rank)
        if rank.torch_path is not None:
            yield from _torch(rank, rank.torch_path)


def _label(what: str, pid: int, tid: int = 0, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _horovod(rank: RankTrace) -> Iterator[Event]:
    if not rank.operations:
        return
    number = rank.about.rank
    yield _label("thread_name", number, _HOROVOD_TRACK, name="Horovod")
    yield _label("thread_sort_index", number, _HOROVOD_TRACK, sort_index=-1)
    for operation in rank.operations:
        base = {"cat": "horovod", "ph": "X", "pid": number, "tid": _HOROVOD_TRACK}
        start = rank.clock.to_rank_0(operation.start)
        several = f" of {len(operation.names)}" if len(operation.names) > 1 else ""
        args = {"tensors": operation.names, "bytes": operation.num_bytes}
        yield base | {
            "name": f"{operation.kind}{several}",
            "ts": start,
            "dur": operation.end - operation.start,
            "args": args,
        }
        for name, (began, ended) in operation.activities.items():
            yield base | {
                "name": name,
                "ts": start + began - operation.start,
                "dur": min(ended, operation.end) - began,
            }


def _torch(rank: RankTrace, path: Path) -> Iterator[Event]:
    """Yield the events of torch's profiler, converted from the time of day."""
    number = rank.about.rank
    about = rank.about
    base_us = read_head(path).get("baseTimeNanoseconds", 0) / 1000
    shift = base_us - (about.unix_ns - about.monotonic_ns) / 1000
    tracks: dict[tuple[Any, Any], int] = {}
    for event in read_events(path):
        if event.get("ph") not in ("X", "s", "f", "t") or not isinstance(
            event.get("ts"), (int, float)
        ):
            continue
        on_gpu = event.get("cat") in _ON_GPU
        key = (event.get("pid"), event.get("tid"))
        if key not in tracks:
            tracks[key] = (_GPU_TRACKS if on_gpu else _TORCH_TRACKS) + len(tracks)
            name = f"GPU stream {key[1]}" if on_gpu else f"torch, thread {key[1]}"
            yield _label("thread_name", number, tracks[key], name=name)
            yield _label("thread_sort_index", number, tracks[key], sort_index=tracks[key])
        moved = event | {
            "pid": number,
            "tid": tracks[key],
            "ts": rank.clock.to_rank_0(event["ts"] + shift),
        }
        # id of an arrow; Perfetto accepts only integers, and each rank counts from its own start
        if "id" in moved:
            moved["id"] = (number << 32) + int(moved["id"])
        yield moved
