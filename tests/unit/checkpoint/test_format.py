"""A checkpoint's files: every bit is checked before it is read, and nothing is ever unpickled."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.checkpoints import line, load, store_of, written
from trainkit.checkpoint import format as ckpt
from trainkit.checkpoint.files import sha256_of
from trainkit.errors import CheckpointError

FILES = ["manifest.json", "training.pt", "weights.safetensors"]


def test_the_manifest_describes_its_files(tmp_path: Path) -> None:
    """The manifest holds the given values, the time of writing, and size and hash of each file."""
    manifest = ckpt.verify(written(tmp_path))
    assert manifest["epoch"] == 1
    assert manifest["written"].startswith("20")
    assert {name: sorted(about) for name, about in manifest["files"].items()} == {
        "training.pt": ["bytes", "sha256"],
        "weights.safetensors": ["bytes", "sha256"],
    }


def test_weights_and_training_state_round_trip(tmp_path: Path) -> None:
    """A written checkpoint is read back bit for bit."""
    training = {
        "momentum": torch.randn(3),
        "numbers": [1, 2.5, None, "a", True],
        "nested": {"t": (1, 2)},
    }
    folder, model = written(tmp_path, training=training), line(seed=1)
    ckpt.load_weights(folder, model)
    assert torch.equal(model.weight, line().weight)
    back = ckpt.load_training(folder)
    assert torch.equal(back["momentum"], training["momentum"])
    assert (back["numbers"], back["nested"]) == (training["numbers"], training["nested"])


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    """A weight that two layers share is stored once, loaded into both, and still shared."""
    models = [nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)) for _ in range(2)]
    for model in models:
        model[1].weight = model[0].weight
    folder = written(tmp_path, model=models[0])
    ckpt.load_weights(folder, models[1])
    assert torch.equal(models[1][1].weight, models[0][0].weight)
    assert models[1][1].weight is models[1][0].weight
    assert (folder / "weights.safetensors").stat().st_size < 1.5 * 4 * 300 * 300


def test_a_module_under_two_names_comes_back(tmp_path: Path) -> None:
    """A batch norm, buffers and all, that a model reaches by two names is saved and loaded."""
    models = [nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)) for _ in range(2)]
    for model in models:
        model.same = model[0]
    models[0][0].running_mean.fill_(3.0)
    ckpt.load_weights(written(tmp_path, model=models[0]), models[1])
    assert models[1].same.running_mean.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_channels_last_weights_keep_their_layout(tmp_path: Path, dtype: torch.dtype) -> None:
    """Weights of channels_last models are restored with their values, layout and dtype."""
    models = [
        nn.Conv2d(3, 4, 3).to(dtype=dtype, memory_format=torch.channels_last) for _ in range(2)
    ]
    ckpt.load_weights(written(tmp_path, model=models[0]), models[1])
    assert torch.equal(models[1].weight, models[0].weight)
    assert models[1].weight.dtype == dtype
    assert models[1].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", FILES)
def test_every_byte_counts(tmp_path: Path, name: str) -> None:
    """One flipped bit in any byte of any file of a checkpoint is found; in the manifest too."""
    folder = written(tmp_path)
    whole = (folder / name).read_bytes()
    places = range(len(whole)) if name == "manifest.json" else range(0, len(whole), 7)
    for place in places:
        (folder / name).write_bytes(
            whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :]
        )
        with pytest.raises(CheckpointError, match=r"is damaged|no whole checkpoint"):
            ckpt.verify(folder)
    (folder / name).write_bytes(whole)
    ckpt.verify(folder)


@pytest.mark.parametrize("name", FILES)
def test_every_cut_is_found(tmp_path: Path, name: str) -> None:
    """A file cut at any place, or with something behind its end, is found."""
    folder = written(tmp_path)
    whole = (folder / name).read_bytes()
    for end in [*range(0, len(whole), 13), len(whole) - 1]:
        (folder / name).write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match=r"is damaged|no whole checkpoint"):
            ckpt.verify(folder)
    (folder / name).write_bytes(whole + b"\n")
    with pytest.raises(CheckpointError, match="is damaged"):
        ckpt.verify(folder)


@pytest.mark.parametrize("name", ["weights.safetensors", "training.pt"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    """The file that was changed, and the one that is gone, are named."""
    folder = written(tmp_path)
    (folder / name).write_bytes(b"0" + (folder / name).read_bytes()[1:])
    with pytest.raises(CheckpointError, match=rf"one is damaged: {name} is not what was written\."):
        ckpt.verify(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"one is damaged: {name} is missing\."):
        ckpt.verify(folder)


@pytest.mark.parametrize(
    "text",
    [None, "", "{", "[]", '{"epoch": 1}', '{"files": 3}', '{"files": {}}', '{"files": {"a": 1}}'],
)
def test_a_manifest_that_says_nothing_is_no_checkpoint(tmp_path: Path, text: str | None) -> None:
    """A folder without a readable manifest is no checkpoint."""
    folder = written(tmp_path)
    (folder / "manifest.json").unlink()
    if text is not None:
        (folder / "manifest.json").write_text(text)
    with pytest.raises(
        CheckpointError, match=r"is no whole checkpoint: its manifest\.json cannot be read"
    ):
        ckpt.verify(folder)


def test_the_seal_may_stand_in_a_config_too(tmp_path: Path) -> None:
    """A config that holds the very words of the manifest's own seal changes nothing."""
    words = {"sha256_of_this_file": "0" * 64, "a": '"sha256_of_this_file": "' + "0" * 64 + '"'}
    assert ckpt.verify(written(tmp_path, config=words))["config"] == words


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("plain", [True, False])
def test_a_malicious_checkpoint_runs_nothing(tmp_path: Path, plain: bool) -> None:
    """A training state that would run code, under a manifest with the right hashes,
    is refused and runs nothing.
    """
    folder, trap = written(tmp_path), tmp_path / "sprung"
    if plain:
        (folder / "training.pt").write_bytes(pickle.dumps(Trap(trap), protocol=2))
    else:
        torch.save({"state": Trap(trap)}, folder / "training.pt")
    reseal(folder)
    with pytest.raises(
        CheckpointError,
        match=r"training\.pt is refused: it holds more than tensors and plain values",
    ):
        load("last", [store_of(tmp_path)], line(), resume=True)
    assert not trap.exists()


def reseal(folder: Path) -> None:
    """Write the manifest that fits the files as they are, as an attacker would."""
    manifest = ckpt.read_manifest(folder)
    for name in manifest["files"]:
        path = folder / name
        manifest["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    text = ckpt.json.dumps(manifest, indent=2).encode() + b"\n"
    bare = ckpt._with_seal(text, "0" * 64)
    (folder / "manifest.json").write_bytes(
        ckpt._with_seal(text, ckpt.hashlib.sha256(bare).hexdigest())
    )


@pytest.mark.parametrize(
    "model", [nn.Linear(4, 2), nn.Sequential(nn.Linear(3, 2)), nn.Linear(3, 2, bias=False)]
)
def test_weights_of_another_model_are_refused(tmp_path: Path, model: nn.Module) -> None:
    """Other shapes, other names and missing weights are refused; the error names them."""
    with pytest.raises(
        CheckpointError,
        match=r"(?s)^The weights in .*one do not fit this model:\n  .*(weight|bias)",
    ):
        ckpt.load_weights(written(tmp_path), model)
