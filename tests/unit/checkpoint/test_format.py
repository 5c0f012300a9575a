"""A checkpoint on disk: whole or not there, checked before it is read, and never unpickled."""

from __future__ import annotations

import os
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainkit.checkpoint import format as ckpt
from trainkit.errors import CheckpointError


def line(seed: int = 0) -> nn.Linear:
    """Return a small model."""
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def written(tmp_path: Path, name: str = "one", training: Any = None) -> Path:
    """Return the folder of a checkpoint."""
    folder = tmp_path / "run" / "checkpoints" / name
    ckpt.write(folder, line(), {"step": 3} if training is None else training, {"epoch": 1})
    return folder


@contextmanager
def small_disk(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_is_a_folder_of_three_files(tmp_path: Path) -> None:
    """Weights, training state and manifest lie in one folder, and nothing else beside it."""
    folder = written(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "training.pt", "weights.safetensors"]
    assert [p.name for p in folder.parent.iterdir()] == ["one"]


def test_the_manifest_tells_what_it_is(tmp_path: Path) -> None:
    """The manifest holds what it was given, and size and hash of each file."""
    manifest = ckpt.verify(written(tmp_path))
    assert manifest["epoch"] == 1
    assert {name: sorted(about) for name, about in manifest["files"].items()} == {
        "training.pt": ["bytes", "sha256"],
        "weights.safetensors": ["bytes", "sha256"],
    }


def test_weights_and_training_state_round_trip(tmp_path: Path) -> None:
    """What was written is read back bit for bit."""
    training = {"momentum": torch.randn(3), "numbers": [1, 2.5, None, "a", True], "nested": {"t": (1, 2)}}
    folder, model = written(tmp_path, training=training), line(seed=1)
    ckpt.load_weights(folder, model)
    assert torch.equal(model.weight, line().weight)
    back = ckpt.load_training(folder)
    assert torch.equal(back["momentum"], training["momentum"])
    assert (back["numbers"], back["nested"]) == (training["numbers"], training["nested"])


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """A weight that two layers share is saved, loaded into both, and still shared."""
    models = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2)]
    for model in models:
        model[1].weight = model[0].weight
    ckpt.write(tmp_path / "tied", models[0], None, {})
    ckpt.load_weights(tmp_path / "tied", models[1])
    assert torch.equal(models[1][1].weight, models[0][0].weight)
    assert models[1][1].weight is models[1][0].weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_channels_last_weights_keep_their_layout(tmp_path: Path, dtype: torch.dtype) -> None:
    """Weights of channels_last models come back with their values, layout and dtype."""
    models = [nn.Conv2d(3, 4, 3).to(dtype=dtype, memory_format=torch.channels_last) for _ in range(2)]
    ckpt.write(tmp_path / "conv", models[0], None, {})
    ckpt.load_weights(tmp_path / "conv", models[1])
    assert torch.equal(models[1].weight, models[0].weight)
    assert models[1].weight.dtype == dtype
    assert models[1].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_checkpoint_is_replaced_whole(tmp_path: Path) -> None:
    """Writing over a checkpoint leaves the new one, and no trace of the old."""
    folder = written(tmp_path)
    (folder / "old").touch()
    ckpt.write(folder, line(), None, {"epoch": 2})
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "weights.safetensors"]
    assert ckpt.verify(folder)["epoch"] == 2


@pytest.mark.parametrize(("weights", "training"), [(100_000, 1), (1, 100_000)])
def test_a_full_disk_is_an_oserror_and_leaves_nothing(tmp_path: Path, weights: int, training: int) -> None:
    """Where the disk takes the weights or the training state no more, nothing is left and the error is an OSError."""
    model = nn.Linear(weights, 1)
    with small_disk(50_000), pytest.raises(OSError, match=r"."):
        ckpt.write(tmp_path / "big", model, {"state": torch.zeros(training)}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_failing_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """A write that fails half way leaves the checkpoint that it would have replaced."""
    folder = written(tmp_path)
    with pytest.raises(TypeError, match="not JSON serializable"):
        ckpt.write(folder, line(1), None, {"about": object()})
    assert ckpt.verify(folder)["epoch"] == 1
    assert [p.name for p in folder.parent.iterdir()] == ["one"]


def test_a_link_is_moved_in_one_step(tmp_path: Path) -> None:
    """`point` makes a relative link, and moves it when it is there."""
    first, second = written(tmp_path, "one"), written(tmp_path, "two")
    for folder in (first, second):
        ckpt.point(folder.parent / "last", folder)
        assert os.readlink(folder.parent / "last") == folder.name
    assert sorted(p.name for p in first.parent.iterdir()) == ["last", "one", "two"]


@pytest.mark.parametrize("name", ["weights.safetensors", "training.pt"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    """One changed byte in a file is found, and the file is named."""
    folder = written(tmp_path)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"one is damaged: {name} is not what was written\..*ckpt_path"):
        ckpt.verify(folder)


@pytest.mark.parametrize("name", ["weights.safetensors", "training.pt"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    """A file that is gone is named."""
    folder = written(tmp_path)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"one is damaged: {name} is missing\."):
        ckpt.verify(folder)


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"epoch": 1}', '{"files": 3}', '{"files": {}}', '{"files": {"a": 1}}'])
def test_a_manifest_that_says_nothing_is_no_checkpoint(tmp_path: Path, text: str | None) -> None:
    """A folder without a readable manifest is no checkpoint."""
    folder = written(tmp_path)
    (folder / "manifest.json").unlink()
    if text is not None:
        (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"is no whole checkpoint: its manifest\.json cannot be read"):
        ckpt.verify(folder)


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("plain", [True, False])
def test_a_malicious_checkpoint_runs_nothing(tmp_path: Path, plain: bool) -> None:
    """A training state that would run code when unpickled is refused, and runs nothing."""
    folder, trap = written(tmp_path), tmp_path / "sprung"
    if plain:
        (folder / "training.pt").write_bytes(pickle.dumps(Trap(trap), protocol=2))
    else:
        torch.save({"state": Trap(trap)}, folder / "training.pt")
    with pytest.raises(CheckpointError, match=r"training\.pt is refused: it holds more than tensors and plain values"):
        ckpt.load_training(folder)
    assert not trap.exists()


def test_weights_alone_cannot_be_gone_on_from(tmp_path: Path) -> None:
    """A checkpoint of weights alone says that it cannot be trained on."""
    ckpt.write(tmp_path / "bare", line(), None, {})
    with pytest.raises(CheckpointError, match=r"bare holds weights alone: a run cannot go on from it"):
        ckpt.load_training(tmp_path / "bare")


@pytest.mark.parametrize("model", [nn.Linear(4, 2), nn.Sequential(nn.Linear(3, 2)), nn.Linear(3, 2, bias=False)])
def test_weights_of_another_model_are_refused(tmp_path: Path, model: nn.Module) -> None:
    """Other shapes, other names and missing weights are refused, with what does not fit."""
    with pytest.raises(CheckpointError, match=r"(?s)^The weights in .*one do not fit this model:\n  .*(weight|bias)"):
        ckpt.load_weights(written(tmp_path), model)


def test_last_and_best_are_found(tmp_path: Path) -> None:
    """ "last" and "best" are the links of the run; a path is itself."""
    folder = written(tmp_path)
    run = folder.parent.parent
    ckpt.point(folder.parent / "last", folder)
    assert ckpt.resolve("last", run) == folder
    assert ckpt.resolve(str(folder), tmp_path) == folder


def test_a_missing_best_lists_what_there_is(tmp_path: Path) -> None:
    """Where there is no "best", the message lists the checkpoints of the run."""
    folder = written(tmp_path)
    with pytest.raises(CheckpointError, match=r"ckpt_path is 'best', and .*checkpoints has no 'best'; there are one\."):
        ckpt.resolve("best", folder.parent.parent)


def test_a_run_without_checkpoints_points_to_the_newest_that_has(tmp_path: Path) -> None:
    """Where this run has none, the message names the newest run beside it that does."""
    folder = written(tmp_path)
    ckpt.point(folder.parent / "last", folder)
    with pytest.raises(CheckpointError, match=rf"no checkpoints there\. The newest run .* run_dir={tmp_path / 'run'}$"):
        ckpt.resolve("last", tmp_path / "new")
    with pytest.raises(CheckpointError, match=r"no checkpoints there\. Give the run's folder: run_dir=\.\.\.$"):
        ckpt.resolve("last", tmp_path / "elsewhere" / "new")


def test_a_path_that_is_no_checkpoint_is_told_what_one_is(tmp_path: Path) -> None:
    """Any other folder is refused, with what a checkpoint's folder holds."""
    with pytest.raises(CheckpointError, match=r"must be 'last', 'best', or the folder of a checkpoint \(.*manifest\.json"):
        ckpt.resolve(str(tmp_path), tmp_path)
