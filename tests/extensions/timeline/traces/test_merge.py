"""The merged file of a recording, and the alignment of ranks in it."""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.recordings import record
from trainkit.extensions.timeline import command
from trainkit.extensions.timeline.report.steps import analyse
from trainkit.extensions.timeline.traces.merge import (
    TraceError,
    read_recording,
    recordings,
    write_whole,
)
from trainkit.extensions.timeline.traces.pieces import FOLDER, HOROVOD, OWN, TORCH


def whole(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the merged file, parsed strictly."""
    content = json.loads(gzip.decompress(write_whole(folder).read_bytes()))
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def test_ranks_are_processes(tmp_path: Path) -> None:
    """Each with its name, its steps and its Horovod track."""
    record(tmp_path, ranks=2, steps=2, gradients={"a": 400, "b": 800})
    events = whole(tmp_path)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0 on node0 (cpu)", 1: "rank 1 on node1 (cpu)"}
    tracks = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert tracks == {(rank, name) for rank in (0, 1) for name in ("steps", "Horovod")}
    assert {e["name"] for e in events if e.get("cat") == "horovod"} >= {
        "ALLREDUCE of 2",
        "GLOO_ALLREDUCE",
    }
    assert min(e["ts"] for e in events if "ts" in e) == 0.0


def test_a_folder_that_may_only_be_read_has_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A colleague's: the page and the file of all ranks are left out, and a line says why."""

    def refuse(*given: object) -> None:
        raise PermissionError(13, "Permission denied")

    record(tmp_path / "timeline" / "step-0", ranks=2, steps=2)
    monkeypatch.setattr(command, "write_timeline_page", refuse)
    assert command.main("timeline", [str(tmp_path / "timeline" / "step-0"), "--json"]) == 0
    shown = capsys.readouterr()
    facts = json.loads(shown.out)
    assert (facts["ranks"], facts["page"], facts["trace"]) == (2, None, None)
    assert "Permission denied. Copy the folder" in " ".join(shown.err.split())


def test_complete_events_nest(tmp_path: Path) -> None:
    """On each track, as the format asks: else a viewer draws them wrongly."""
    record(tmp_path, ranks=2, steps=3, gradients={"a": 400, "b": 800})
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in whole(tmp_path):
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for spans in tracks.values():
        open_: list[float] = []
        for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while open_ and open_[-1] <= start + 1e-3:
                open_.pop()
            assert not open_ or end <= open_[-1] + 1e-3
            open_.append(end)


def test_another_hosts_clock_is_aligned(tmp_path: Path) -> None:
    """A rank with a clock an hour ahead has its steps in the right place,
    within the given bound.
    """
    record(tmp_path, ranks=2, steps=2, skews_ms={1: 3_600_000.0})
    first, second = read_recording(tmp_path)
    assert first.clock.error_us == 0.0 and 0 < second.clock.error_us <= 100.0
    starts = {e["pid"]: e["ts"] for e in whole(tmp_path) if e["name"] == "step 1"}
    assert starts[1] == pytest.approx(starts[0], abs=second.clock.error_us)
    assert any(
        "clock +- 0.1 ms" in str(e["args"]) for e in whole(tmp_path) if e["name"] == "process_name"
    )


def test_torch_is_brought_to_the_same_clock(tmp_path: Path) -> None:
    """The profiler counts from a time of day; our file records the time of day of its own zero."""
    record(tmp_path, steps=1)  # monotonic 0 is 10**18 ns of the day; the step begins at 1000 ms
    event = {
        "ph": "X",
        "name": "aten::mm",
        "cat": "cpu_op",
        "ts": 1_005_000.0,
        "dur": 10.0,
        "pid": 99,
        "tid": 7,
        "id": 3,
    }
    kernel = event | {"name": "sgemm", "cat": "kernel", "pid": 0, "tid": 20}
    early = event | {"name": "profiler", "ts": 5.0}
    content = {
        "baseTimeNanoseconds": 10**18,
        "traceEvents": [early, event, kernel, {"ph": "M", "name": "process_name", "pid": 99}],
    }
    (tmp_path / TORCH.format(0)).write_bytes(gzip.compress(json.dumps(content).encode()))
    events = whole(tmp_path)
    (found,) = [e for e in events if e["name"] == "aten::mm"]
    assert (found["pid"], found["ts"], found["id"]) == (0, pytest.approx(5000.0), 3)
    assert not any(e["name"] == "profiler" for e in events), "it was before the first step"
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"torch, thread 7", "GPU stream 20"} <= names


def test_a_rank_that_was_killed_is_there_as_far_as_it_came(tmp_path: Path) -> None:
    """Its file is cut off; the others are whole."""
    record(tmp_path, ranks=2, steps=4)
    path = tmp_path / OWN.format(1)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    steps = {
        rank: {
            e["name"] for e in whole(tmp_path) if e["pid"] == rank and e["name"].startswith("step")
        }
        for rank in (0, 1)
    }
    assert steps[1] and steps[1] < steps[0]


def test_the_newest_recording_is_the_last(tmp_path: Path) -> None:
    """Of a run, by time."""
    for name in ("steps-5-6", "steps-1-2"):
        record(tmp_path / FOLDER / name, steps=2)
    assert [folder.name for folder in recordings(tmp_path)] == ["steps-5-6", "steps-1-2"]
    assert recordings(tmp_path / "nothing") == []


def test_a_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    """The message says how to record one."""
    (tmp_path / OWN.format(0)).write_text("[")
    with pytest.raises(TraceError, match=r"no readable recording.*callbacks=timeline"):
        read_recording(tmp_path)


@given(
    st.integers(0, 10**6), st.integers(1, 60), st.sampled_from([OWN, HOROVOD, TORCH]), st.booleans()
)
@settings(max_examples=150, deadline=None)
def test_a_damaged_recording_is_read_as_far_as_it_goes(
    at: int, length: int, file: str, is_cut: bool
) -> None:
    """Bytes that are missing or others, in any of the files, are no error of ours."""
    with tempfile.TemporaryDirectory() as place:
        folder = record(Path(place), ranks=2, steps=3, gradients={"a": 400, "b": 800})
        event = {
            "ph": "X",
            "name": "aten::mm",
            "cat": "cpu_op",
            "ts": 1_005_000.0,
            "dur": 10.0,
            "pid": 99,
            "tid": 7,
        }
        content = {"baseTimeNanoseconds": 10**18, "traceEvents": [event] * 50}
        (folder / TORCH.format(1)).write_bytes(gzip.compress(json.dumps(content).encode()))
        path = folder / file.format(1)
        whole_, start = path.read_bytes(), at % path.stat().st_size
        path.write_bytes(
            whole_[:start] + (b"" if is_cut else b"\x00" * length) + whole_[start + length :]
        )
        write_whole(folder)
        with contextlib.suppress(TraceError):
            analyse(read_recording(folder))
