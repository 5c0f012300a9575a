"""A rank's file: written event by event, and readable up to any cut."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.helpers.recordings import ABOUT, record
from trainkit.extensions.timeline.traces.pieces import (
    OWN,
    TraceFile,
    about_of,
    read_events,
    read_head,
    span,
)


def events_of(path: Path) -> int:
    """Write a piece of ten events and return how long its file is."""
    piece = TraceFile(path, ABOUT)
    for i in range(10):
        piece.add([span("part", i, i + 1, 0, step=i)])
    piece.close()
    return path.stat().st_size


def test_a_piece_is_json(tmp_path: Path) -> None:
    """A closed file is JSON for any reader; the first event describes the rank."""
    events_of(tmp_path / "a.json")
    assert len(json.loads((tmp_path / "a.json").read_text())) == 11
    assert about_of(read_events(tmp_path / "a.json")) == ABOUT


def test_a_piece_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    """At any byte: no complete event is lost, none is invented."""
    size = events_of(tmp_path / "whole.json")
    whole, text = read_events(tmp_path / "whole.json"), (tmp_path / "whole.json").read_bytes()
    counts = []
    for length in range(size):
        (tmp_path / "cut.json").write_bytes(text[:length])
        found = read_events(tmp_path / "cut.json")
        assert found == whole[: len(found)]
        counts.append(len(found))
    assert counts == sorted(counts) and counts[-1] == 11


def test_a_recording_of_trainkit_0_2_has_its_shares() -> None:
    """There they have another name."""
    facts = {name: value for name, value in asdict(ABOUT).items() if name != "rank_shares"}
    event = {"name": "trainkit", "args": facts | {"dealt": "3:1"}}
    assert about_of([event]) == replace(ABOUT, rank_shares="3:1")


@pytest.mark.parametrize(
    "content", [b"", b"[", b"nonsense", b"{}", b"[1, 2", b'{"traceEvents": 5}', b"\x1f\x8b\x08"]
)
def test_what_is_no_trace_has_no_events(tmp_path: Path, content: bytes) -> None:
    """A damaged file is read as empty, not as an error."""
    (tmp_path / "a.json").write_bytes(content)
    assert read_events(tmp_path / "a.json") == []
    assert about_of([]) is None and about_of([{"name": "trainkit", "args": {"rank": 1}}]) is None


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    """Its events are in an object, often gzipped; a cut file is read too."""
    events = [
        {"ph": "X", "name": f"op{i}", "ts": i, "dur": 1, "pid": 1, "tid": 1} for i in range(200)
    ]
    content = json.dumps(
        {"schemaVersion": 1, "baseTimeNanoseconds": 77, "traceEvents": events}
    ).encode()
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(content))
    assert read_events(path) == events and read_head(path) == {
        "schemaVersion": 1,
        "baseTimeNanoseconds": 77,
    }
    path.write_bytes(gzip.compress(content)[:-200])
    cut = read_events(path)
    assert 0 < len(cut) < 200 and cut == events[: len(cut)] and read_head(path) == {}


def test_a_kill_leaves_what_was_added(tmp_path: Path) -> None:
    """Each `add` is in the file when it returns: nothing waits in a buffer."""
    piece = TraceFile(tmp_path / OWN.format(0), ABOUT)
    piece.add([span("part", 0, 1, 0)])
    assert len(read_events(tmp_path / OWN.format(0))) == 2
    piece.close()


def test_made_up_recordings_are_readable(tmp_path: Path) -> None:
    """The helper's recordings, used by other tests, are valid."""
    record(tmp_path, ranks=2)
    assert [about_of(read_events(tmp_path / OWN.format(i))).rank for i in (0, 1)] == [0, 1]  # type: ignore[union-attr]
