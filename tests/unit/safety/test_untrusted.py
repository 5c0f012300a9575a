"""Files from elsewhere: names and sizes in a manifest are checked before anything is opened."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest
import torch
from rich.table import Table
from rich.text import Text

from trainkit.checkpoint.format import load_plain
from trainkit.checkpoint.weights import read_weights
from trainkit.cli.guard import fail
from trainkit.console import cell, console_of
from trainkit.errors import CheckpointError
from trainkit.extensions.capsule.folder import read
from trainkit.extensions.timeline.traces import unpacking
from trainkit.extensions.timeline.traces.pieces import read_events
from trainkit.launch.environment import Launcher
from trainkit.run.predictions import read_predictions
from trainkit.safety import untrusted
from trainkit.safety.untrusted import check_archive, check_file, read_bounded


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", "", "\x1b[31mred", "a\\b", 3])
def test_a_name_stays_inside_its_folder(name: object, tmp_path: Path) -> None:
    """The message shows no control character."""
    with pytest.raises(CheckpointError, match="is no name of a file inside it") as caught:
        check_file(tmp_path, name, {"bytes": 1})
    assert str(caught.value).isprintable()


def test_a_link_is_refused(tmp_path: Path) -> None:
    """Wherever it leads."""
    (tmp_path / "weights").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="is a link or no plain file"):
        check_file(tmp_path, "weights", {"bytes": 1})


@pytest.mark.parametrize("size", [-1, "1", None, True, 1.5])
def test_a_size_is_a_count(size: object, tmp_path: Path) -> None:
    """Nothing else is compared with a file."""
    with pytest.raises(CheckpointError, match="the size of a is given as"):
        check_file(tmp_path, "a", {"bytes": size})


def test_a_manifest_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger file is not read."""
    monkeypatch.setattr(untrusted, "MOST_OF_MANIFEST", 10)
    (tmp_path / "manifest.json").write_text(" " * 11)
    with pytest.raises(ValueError, match="larger than"):
        read_bounded(tmp_path / "manifest.json")


def test_a_capsule_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    """Before the file is hashed."""
    file = {"bytes": 1, "sha256": ""}
    about = dict.fromkeys(("step", "epoch", "rank", "world_size", "settings", "num_samples"), 0)
    (tmp_path / "manifest.json").write_text(
        json.dumps({**about, "files": {"../../secret": file, "step.pt": file}})
    )
    with pytest.raises(CheckpointError, match="is no name of a file inside it"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("=1+1", "'=1+1"),
        ("@x", "'@x"),
        ("-x", "'-x"),
        ("-1.5", "-1.5"),
        ("+2", "+2"),
        (-3, -3),
        ("a", "a"),
    ],
)
def test_texts_of_a_table_are_no_formulas(value: object, shown: object) -> None:
    """Numbers stay numbers."""
    assert cell(value) == shown


def packed(path: Path, **records: bytes) -> Path:
    """Write a zip archive with compressed records."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return path


def test_records_claim_no_more_than_a_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file that unpacks into a large one is refused before torch reads it:
    as weights, as a step, as predictions.
    """
    monkeypatch.setattr(untrusted, "MOST_OF_MANIFEST", 1 << 16)
    bomb = packed(tmp_path / "000000000000-00000.pt", data=bytes(1 << 20))
    for read_it in (
        lambda path: read_weights(str(path)),
        load_plain,
        lambda path: list(read_predictions(path.parent)),
    ):
        with pytest.raises(
            CheckpointError, match="its records claim 1,048,576 bytes, and the file has"
        ):
            read_it(bomb)


def test_files_of_torch_pass(tmp_path: Path) -> None:
    """Those of torch.save, and whatever is no archive."""
    torch.save({"a": torch.zeros(1000), "b": "text" * 1000}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"no archive")
    check_archive(tmp_path / "a.pt")
    check_archive(tmp_path / "b.pt")


def test_predictions_are_plain_files(tmp_path: Path) -> None:
    """A link is refused, wherever it leads."""
    torch.save([1], tmp_path / "elsewhere")
    (tmp_path / "000000000000-00000.pt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link or no plain file"):
        list(read_predictions(tmp_path))


def test_a_recording_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacked it may have so many bytes; one that was cut off is read up to there."""
    text = json.dumps([{"name": "a", "ph": "X"}] * 1000).encode()
    (tmp_path / "whole.json.gz").write_bytes(gzip.compress(text))
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(text)[:-20])
    assert len(read_events(tmp_path / "whole.json.gz")) == 1000
    assert 0 < len(read_events(tmp_path / "cut.json.gz")) <= 1000
    (tmp_path / "link.json").symlink_to(tmp_path / "whole.json.gz")
    with pytest.raises(CheckpointError, match="is a link or no plain file"):
        read_events(tmp_path / "link.json")
    monkeypatch.setattr(unpacking, "MOST_UNPACKED", 1000)
    with pytest.raises(CheckpointError, match="A recording is refused"):
        read_events(tmp_path / "whole.json.gz")


def test_control_characters_never_reach_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """In tables, in texts and in errors:
    a name of a metric, or the reason that a capsule states, may have any.
    """
    evil = "\x1b]0;title\x07\x9b2J\r"
    table = Table(title=evil)
    table.add_column(evil)
    table.add_row(Text(evil))
    console_of().print(table, Text(evil), evil, soft_wrap=True, markup=False)
    assert fail(CheckpointError(evil), Launcher("none", 0, 1, 0, 1), evil, 1) == 1
    shown = "".join(capsys.readouterr())
    assert shown.count("x1b]0;tit") == 6
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(shown)
