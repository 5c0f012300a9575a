"""A rank's file of a recording, in Chrome's trace format; it stays readable if it is cut off
anywhere.

The format is a JSON array of events (Trace Event Format, Google 2016: "JSON Array Format", whose
closing bracket may be missing); ours has one event a line. Times are microseconds of the host's
monotonic clock.

    {"name": "forward", "cat": "part", "ph": "X", "ts": 12.5, "dur": 3.1, "pid": 0, "tid": 0,
    "args": {"step": 50}}

The first event describes the rank: `About`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trainkit.extensions.timeline.traces.unpacking import unpack_bounded
from trainkit.safety.untrusted import check_name

Event = dict[str, Any]

ABOUT = "trainkit"
MEETINGS = "meetings"
SUMMED = "gradient"
FOLDER = "timeline"  # in a run's folder; it has a folder per recording
# files of a rank, in the recording's folder
OWN = "rank-{}.json"
HOROVOD = "horovod-{}.json"
TORCH = "torch-{}.json.gz"
WHOLE = "trace.json.gz"  # the merged file
_RENAMED = {"dealt": "rank_shares"}  # in recordings of trainkit 0.2
# in FOLDER: requests a recording of a running job; holds the number of steps, or nothing
REQUEST = "record"
PATIENCE_S = 30.0  # the command `record` waits this long for the job to react


@dataclass(frozen=True)
class About:
    """Facts about a rank, and the meaning of its clock."""

    rank: int
    world_size: int
    host: str
    boot: str  # id of the host's boot: processes of one boot share their monotonic clock
    monotonic_ns: int  # a reading of that clock, at the moment at which...
    unix_ns: int  # ...this was the time of day
    engine: str = ""
    device: str = "cpu"  # "cpu", or the GPU's name
    samples: int = 0  # samples of a step on all ranks; 0 if they vary
    accumulate: int = 1  # microbatches of a rank in a step
    cycle_ms: float = 0.0  # Horovod's cycle time, 0 without Horovod
    fusion_bytes: int = 0  # Horovod's fusion threshold, 0 without Horovod
    wire: str = "none"  # number format of gradients in transfer: "none", "fp16", "bf16"
    workers: int = -1  # number of this rank's loader workers; -1 if unknown
    rank_shares: str = "even"  # shares of a step's samples, as "3:1" (trainer.rank_shares)


class TraceFile:
    """A rank's file during writing; flushed after each `add`."""

    def __init__(self, path: Path, about: About) -> None:
        """Start the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self.rank = about.rank
        self._file.write(
            "[" + json.dumps({"name": ABOUT, "ph": "M", "pid": about.rank, "args": asdict(about)})
        )
        self._file.flush()

    def add(self, events: Iterable[Event]) -> None:
        """Write events."""
        self._file.write(
            "".join(",\n" + json.dumps(event, separators=(",", ":")) for event in events)
        )
        self._file.flush()

    def drop(self) -> None:
        """Close the file without its end."""
        self._file.close()

    def close(self) -> None:
        """Complete the file."""
        self._file.write("\n]\n")
        self._file.close()


def span(name: str, start_ns: int, end_ns: int, rank: int, tid: int = 0, **args: Any) -> Event:
    """Return a complete event; times are nanoseconds of the monotonic clock."""
    event = {
        "name": name,
        "cat": "part",
        "ph": "X",
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
    }
    return event | {"pid": rank, "tid": tid, "args": args}


def read_events(path: Path) -> list[Event]:
    """Return the events of a trace file, plain or gzipped;
    of a file that was cut off, the complete ones.
    """
    text = _read(path).decode(errors="replace")
    try:
        content = json.loads(text)
    except ValueError:
        return list(_as_far_as_it_goes(text))
    events = content.get("traceEvents", []) if isinstance(content, dict) else content
    return (
        [event for event in events if isinstance(event, dict)] if isinstance(events, list) else []
    )


def read_head(path: Path) -> dict[str, Any]:
    """Return the fields of a torch profiler file other than its events;
    an empty dict if the file was cut off.
    """
    with contextlib.suppress(ValueError):
        content = json.loads(_read(path))
        return (
            {k: v for k, v in content.items() if k != "traceEvents"}
            if isinstance(content, dict)
            else {}
        )
    return {}


def own_events(events: Iterable[Event]) -> Iterator[Event]:
    """Yield our own events that are complete: a damaged file has incomplete ones."""
    for event in events:
        args = event.get("args")
        about = args if isinstance(args, dict) else {}
        is_step = isinstance(about.get("step"), int)
        if event.get("name") == MEETINGS:
            times = about.get("times")
            is_whole = isinstance(times, list) and all(
                isinstance(pair, list) and len(pair) == 2 for pair in times
            )
        elif event.get("cat") == SUMMED:
            begins, ends = event.get("ph") == "b", event.get("ph") == "e"
            is_full = (
                is_step
                and isinstance(about.get("bytes"), int)
                and isinstance(about.get("names"), list)
                and about["names"]
            )
            is_whole = (
                isinstance(event.get("id"), str)
                and _has_numbers(event, "ts")
                and bool(ends or (begins and is_full))
            )
        else:
            spans = (
                event.get("cat") == "part"
                and event.get("ph") == "X"
                and isinstance(event.get("name"), str)
            )
            counts = "samples" not in about or isinstance(about["samples"], int)
            is_whole = spans and is_step and counts and _has_numbers(event, "ts", "dur", "tid")
        if is_whole:
            yield event


def _has_numbers(event: Event, *keys: str) -> bool:
    return all(isinstance(event.get(key), (int, float)) for key in keys)


def about_of(events: list[Event]) -> About | None:
    """Return the facts about the rank of these events, or None if they are not ours."""
    if not events or events[0].get("name") != ABOUT:
        return None
    known = {field.name for field in fields(About)}
    try:
        facts = {_RENAMED.get(name, name): value for name, value in events[0]["args"].items()}
        return About(**{name: value for name, value in facts.items() if name in known})
    except (KeyError, TypeError, AttributeError):
        return None


def _read(path: Path) -> bytes:
    content = check_name(path.parent, path.name).read_bytes()
    return unpack_bounded(content) if content[:2] == b"\x1f\x8b" else content


def _as_far_as_it_goes(text: str) -> Iterator[Event]:
    decoder = json.JSONDecoder()
    at = text.find("[", text.find('"traceEvents"') + 1) + 1
    while True:
        while at < len(text) and text[at] in ", \t\r\n":
            at += 1
        try:
            event, at = decoder.raw_decode(text, at)
        except ValueError:
            return
        if isinstance(event, dict):
            yield event
