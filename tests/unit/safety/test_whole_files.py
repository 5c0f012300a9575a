"""Files that are replaced as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.safety.whole_files import replacing


def test_a_reader_sees_the_former_file_until_the_end(tmp_path: Path) -> None:
    """The file changes when the context ends, and nothing stays beside it."""
    path = tmp_path / "a.csv"
    path.write_text("old")
    with replacing(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and [one.name for one in tmp_path.iterdir()] == ["a.csv"]


def test_a_failed_write_leaves_the_former_file_alone(tmp_path: Path) -> None:
    """A full disk costs the new content, and leaves no draft."""
    path = tmp_path / "a.csv"
    path.write_text("old")
    with pytest.raises(OSError, match="no space"), replacing(path) as draft:
        draft.write_text("half")
        raise OSError("no space")
    assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["a.csv"]
