"""A capsule's folder is complete or absent, and a damaged one is refused with a remedy."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from trainkit.checkpoint.files import sha256_of
from trainkit.checkpoint.format import MANIFEST, WEIGHTS
from trainkit.errors import CheckpointError
from trainkit.extensions.capsule.folder import STEP, read, write

ABOUT: dict[str, Any] = {
    "step": 3,
    "epoch": 0,
    "rank": 1,
    "world_size": 2,
    "settings": {},
    "num_samples": None,
}


def written(tmp_path: Path, **more: Any) -> Path:
    """Write a capsule and return its folder."""
    folder = tmp_path / "capsules" / "step=3-rank=1"
    shared = torch.arange(4.0)
    write(
        folder,
        ABOUT | more,
        {"microbatches": [], "loss": torch.ones(1)},
        {"a": shared, "b": shared},
    )
    return folder


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """The manifest, the step's content and the weights are read back; there are no other files."""
    folder = written(tmp_path)
    capsule = read(folder)
    assert {name: capsule.about[name] for name in ABOUT} == ABOUT
    assert torch.equal(capsule.step["loss"], torch.ones(1))
    assert capsule.weights == folder / WEIGHTS
    assert sorted(path.name for path in folder.parent.rglob("*")) == [
        MANIFEST,
        STEP,
        "step=3-rank=1",
        WEIGHTS,
    ]


def test_one_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    """A step that fails again after a restart replaces its capsule."""
    written(tmp_path, epoch=0)
    assert read(written(tmp_path, epoch=7)).about["epoch"] == 7


def test_nothing_is_left_of_a_failed_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk leaves no partial capsule, and is reported as such."""

    def full(*_: Any) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"step\.pt: PytorchStreamWriter failed"):
        written(tmp_path)
    assert list((tmp_path / "capsules").iterdir()) == []


@pytest.mark.parametrize("name", [STEP, WEIGHTS])
def test_a_changed_or_missing_file_is_found(tmp_path: Path, name: str) -> None:
    """One other bit in any file is seen before anything of it is read."""
    folder = written(tmp_path)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=rf"is damaged: {name} is not what was written\. Copy the whole folder again",
    ):
        read(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"is damaged: {name} is missing"):
        read(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": {"step.pt": {}}}', '{"files": {}}'])
def test_a_strange_manifest_is_refused(tmp_path: Path, text: str) -> None:
    """For any fault of it, the error names the manifest."""
    folder = written(tmp_path)
    (folder / MANIFEST).write_text(text)
    with pytest.raises(
        CheckpointError, match=r"is no whole capsule: its manifest\.json cannot be read"
    ):
        read(folder)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("num_samples", 10**12),
        ("num_samples", "8"),
        ("world_size", None),
        ("step", -1),
        ("epoch", 0.5),
        ("total_steps", 1e300),
    ],
)
def test_a_number_that_no_run_has_is_refused(tmp_path: Path, name: str, number: Any) -> None:
    """A replay allocates and counts by the manifest's numbers, which anyone may have written."""
    with pytest.raises(
        CheckpointError,
        match=rf"manifest\.json cannot be read \({name} is .*; it must be a whole number",
    ):
        read(written(tmp_path, **{name: number}))


def test_code_is_refused(tmp_path: Path) -> None:
    """A step.pt that would run code when it is unpickled is not read."""
    folder = written(tmp_path)
    torch.save({"x": Path("/")}, folder / STEP, pickle_module=pickle)
    about = json.loads((folder / MANIFEST).read_text())
    about["files"][STEP] = {
        "bytes": (folder / STEP).stat().st_size,
        "sha256": sha256_of(folder / STEP),
    }
    (folder / MANIFEST).write_text(json.dumps(about))
    with pytest.raises(
        CheckpointError, match="is refused: it holds more than tensors and plain values"
    ):
        read(folder)


def test_a_wrong_path_raises_with_the_right_ones(tmp_path: Path) -> None:
    """The error of a wrong path names the capsules near it;
    if there are none, it says what a capsule is.
    """
    folder = written(tmp_path)
    for near in (tmp_path, tmp_path / "capsules", folder.with_name("step=4-rank=1")):
        with pytest.raises(CheckpointError, match=rf"There are .*{folder.name}"):
            read(near)
    with pytest.raises(
        CheckpointError,
        match=r"no such folder\. Capsules are folders <run_dir>/capsules/step=N-rank=R",
    ):
        read(tmp_path / "other" / "place")
