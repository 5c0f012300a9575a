"""Files from elsewhere: names and sizes in a manifest are checked before anything is opened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainkit.checkpoint.capsule import read
from trainkit.console import cell
from trainkit.errors import CheckpointError
from trainkit.safety import foreign
from trainkit.safety.foreign import check_file, read_bounded


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
    monkeypatch.setattr(foreign, "MOST_OF_MANIFEST", 10)
    (tmp_path / "manifest.json").write_text(" " * 11)
    with pytest.raises(ValueError, match="larger than"):
        read_bounded(tmp_path / "manifest.json")


def test_a_capsule_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    """Before the file is hashed."""
    file = {"bytes": 1, "sha256": ""}
    about = dict.fromkeys(("step", "epoch", "rank", "world_size", "settings", "num_samples"), 0)
    (tmp_path / "manifest.json").write_text(json.dumps({**about, "files": {"../../secret": file, "step.pt": file}}))
    with pytest.raises(CheckpointError, match="is no name of a file inside it"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("value", "shown"), [("=1+1", "'=1+1"), ("@x", "'@x"), ("-x", "'-x"), ("-1.5", "-1.5"), ("+2", "+2"), (-3, -3), ("a", "a")]
)
def test_texts_of_a_table_are_no_formulas(value: object, shown: object) -> None:
    """Numbers stay numbers."""
    assert cell(value) == shown
