"""Weights from files of all kinds: read whole, or refused in words."""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from tests.helpers.foreign_files import Settings, lightning, net, same, saved
from trainkit.checkpoint import format as ckpt
from trainkit.checkpoint.weights import read_weights
from trainkit.errors import CheckpointError


def checkpoint(tmp_path: Path, model: nn.Module) -> Path:
    """Return a checkpoint's folder."""
    (tmp_path / "one").mkdir()
    ckpt.write(tmp_path / "one", ckpt.Snapshot(*ckpt.find_aliases(model.state_dict()), None, {}))
    return tmp_path / "one"


def test_a_checkpoint_folder_is_read(tmp_path: Path) -> None:
    """A checkpoint gives the weights under the model's own names,
    `module.` and shared tensors too.
    """
    model = nn.ModuleDict({"module": net()})
    model["module"].append(model["module"][0])
    assert same(read_weights(str(checkpoint(tmp_path, model))), model.state_dict())


def test_a_damaged_checkpoint_folder_is_refused(tmp_path: Path) -> None:
    """A checkpoint of which one bit differs is refused, by the file's name."""
    path = checkpoint(tmp_path, net()) / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"weights.safetensors is not what was written"):
        read_weights(str(path.parent))


def test_safetensors_are_read_with_their_aliases(tmp_path: Path) -> None:
    """A tensor that has several names is there under each of them."""
    a = torch.arange(3.0)
    safetensors.torch.save_file(
        {"a": a}, tmp_path / "w.safetensors", {"aliases": json.dumps({"b": "a"})}
    )
    assert same(read_weights(str(tmp_path / "w.safetensors")), {"a": a, "b": a})


@pytest.mark.parametrize(
    "wrap",
    [
        dict,
        lambda s: {"state_dict": s, "epoch": 3},
        lambda s: {"model": s, "optimizer": {}},
        lambda s: {"model_state_dict": s, "optimizer_state_dict": {}},
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".pth.tar"])
@pytest.mark.parametrize("as_zip", [True, False])
def test_a_state_dict_is_read(
    wrap: Callable[[Any], Any], suffix: str, as_zip: bool, tmp_path: Path
) -> None:
    """A file of torch.save, now or before 1.6, alone or under the usual keys, gives the weights."""
    state = net().state_dict()
    path = saved(tmp_path, wrap(state), f"w{suffix}", _use_new_zipfile_serialization=as_zip)
    assert same(read_weights(path), state)


def test_a_lightning_checkpoint_is_read_and_its_classes_are_not(tmp_path: Path) -> None:
    """The state_dict is read, bit for bit, and no object of the classes beside it is made."""
    model = net()
    path = saved(tmp_path, lightning(model), "epoch=3.ckpt")
    with pytest.raises(pickle.UnpicklingError):  # otherwise this test would take another path
        torch.load(path, weights_only=True)
    Settings.made.clear()
    assert same(read_weights(path), model.state_dict())
    assert Settings.made == []


def test_views_parameters_and_subclasses_become_plain_tensors(tmp_path: Path) -> None:
    """Transposed and shared tensors, parameters, half precision,
    scalars and empty tensors come out with their values.
    """
    base = torch.arange(12.0).reshape(3, 4)
    with_attribute = nn.Parameter(torch.ones(2))
    with_attribute.tag = "mine"  # type: ignore[attr-defined]
    state = {
        "transposed": base.T,
        "row": base[1],
        "parameter": nn.Parameter(torch.ones(2)),
        "tagged": with_attribute,
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 3),
        "yes": torch.tensor([True]),
    }
    weights = read_weights(saved(tmp_path, {"state_dict": state, "other": Settings(1.0)}))
    assert same(weights, state)
    assert {type(tensor) for tensor in weights.values()} == {Tensor}
    assert not any(tensor.requires_grad for tensor in weights.values())


@pytest.mark.parametrize(
    ("prefix", "shown"),
    [
        ("module.", ""),
        ("_orig_mod.", ""),
        ("module._orig_mod.", ""),
        ("_orig_mod.module.", ""),
        ("net._orig_mod.", "net."),
    ],
)
def test_wrappers_are_taken_out_of_names(prefix: str, shown: str, tmp_path: Path) -> None:
    """Name parts added by torch.compile and DistributedDataParallel are removed."""
    state = net().state_dict()
    path = saved(tmp_path, {prefix + name: tensor for name, tensor in state.items()})
    assert same(read_weights(path), {shown + name: tensor for name, tensor in state.items()})


def test_module_stays_where_not_all_names_have_it(tmp_path: Path) -> None:
    """A part of the model that is called `module` keeps its name."""
    state = {"module.a": torch.ones(1), "head.a": torch.ones(1)}
    assert same(read_weights(saved(tmp_path, state)), state)


def test_names_that_become_one_are_refused(tmp_path: Path) -> None:
    """Two tensors never end under one name."""
    path = saved(tmp_path, {"a": torch.ones(1), "_orig_mod.a": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="two tensors for 'a', one of them as '_orig_mod.a'"):
        read_weights(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "has no weights"),
        ({"state_dict": {}}, "has no weights"),
        (
            {"net": {"a": torch.ones(1)}, "epoch": 3},
            "under 'net', which is no tensor.*state_dict, model, model_state_dict; the file has epoch, net",
        ),
        ({"state_dict": {"a": torch.ones(1), "b": 3}}, "builtins.int under 'b'"),
        (
            {"state_dict": {"a": Settings(1.0)}},
            "tests.helpers.foreign_files.Settings under 'a', which is no tensor",
        ),
        ({"state_dict": {"a": torch.ones(1, device="meta")}}, "under 'a', which is no tensor"),
        ({3: torch.ones(1)}, "under '3'"),
        ([torch.ones(1)], r"one object \(builtins.list\)"),
        (torch.ones(1), r"one object \(torch.Tensor\)"),
        (
            nn.Linear(2, 1),
            (
                r"one object \(torch.nn.modules.linear.Linear\); it must hold a state_dict:"
                r" torch.save\(model.state"
            ),
        ),
    ],
)
def test_a_file_without_a_state_dict_is_refused(content: Any, words: str, tmp_path: Path) -> None:
    """The error names the object found in place of weights, and what to save."""
    with pytest.raises(CheckpointError, match=words):
        read_weights(saved(tmp_path, content))


def damaged(tmp_path: Path, how: str) -> str:
    """Return a file or folder that cannot be read."""
    path = tmp_path / "w.pt"
    if how == "cut":
        whole = Path(saved(tmp_path, lightning(net()), "whole.pt")).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "folder":
        path.mkdir()
    elif how == "script":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.script(net()).save(str(path))
    elif how == "old with classes":
        saved(tmp_path, lightning(net()), "w.pt", _use_new_zipfile_serialization=False)
    elif how == "plain pickle":
        path.write_bytes(pickle.dumps({"a": Settings(1.0)}))
    elif how == "zip":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("a.txt", "hello")
    elif how != "absent":
        path = path.with_suffix(how if how.startswith(".") else ".pt")
        path.write_bytes(b"not at all\n" * 20)
    return str(path)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("absent", "w.pt is not there; it must be a checkpoint's folder, a .safetensors file"),
        ("folder", "w.pt is a folder without a manifest.json or a model.safetensors; it must be"),
        ("cut", "w.pt cannot be read: it is damaged, or not a checkpoint's folder"),
        ("text", "w.pt cannot be read"),
        ("zip", "w.pt cannot be read"),
        ("script", "w.pt cannot be read"),
        ("plain pickle", "w.pt cannot be read"),
        # torch.load is not asked again
        ("old with classes", "(UnpicklingError: Weights only load failed"),
        (".ckpt", "w.ckpt cannot be read"),
        (".safetensors", "w.safetensors is no safetensors file, or a damaged one"),
    ],
)
def test_an_unreadable_file_is_reported(how: str, words: str, tmp_path: Path) -> None:
    """A file that is absent, cut, or of another kind is refused;
    the error lists the legal kinds.
    """
    path = damaged(tmp_path, how)
    with pytest.raises(CheckpointError) as said:
        read_weights(path)
    assert words in str(said.value)
    assert len(str(said.value).replace(str(tmp_path), "").splitlines()) == 1


def test_a_device_is_no_file_of_weights() -> None:
    """The error does not say that it is absent."""
    with pytest.raises(CheckpointError, match="^/dev/null is no regular file; it must be"):
        read_weights("/dev/null")


@pytest.mark.parametrize(
    "aliases", ["no json", "[1]", '{"b": "absent"}', '{"b": ["a"]}', '{"b": 3}']
)
def test_bad_aliases_are_reported(aliases: str, tmp_path: Path) -> None:
    """Metadata that does not say which tensor is meant is a damaged file."""
    safetensors.torch.save_file(
        {"a": torch.ones(1)}, tmp_path / "w.safetensors", {"aliases": aliases}
    )
    with pytest.raises(
        CheckpointError, match="w.safetensors is no safetensors file, or a damaged one"
    ):
        read_weights(str(tmp_path / "w.safetensors"))


def sharded(folder: Path) -> dict[str, Tensor]:
    """Write weights in two files with an index, as transformers does; return them."""
    weights = {"a": torch.arange(3.0), "b": torch.ones(2, 2), "c": torch.zeros(1)}
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    names["c"] = names["b"]
    for file in {*names.values()}:
        of = {name: tensor for name, tensor in weights.items() if names[name] == file}
        safetensors.torch.save_file(of, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": 32}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weights


def test_weights_in_several_files_are_read(tmp_path: Path) -> None:
    """A folder of transformers with an index gives those of all its files."""
    weights = sharded(tmp_path)
    assert same(read_weights(str(tmp_path)), weights)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "is not an index of transformers, or a damaged one"),
        ("[]", "is not an index of transformers"),
        ('{"weight_map": {"a": 3}}', "must name files of its own folder"),
        ('{"weight_map": {}}', "must name files of its own folder"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "must name files of its own folder"),
        ('{"weight_map": {"a": "x.safetensors"}}', "names 1 files, of which x.safetensors are"),
        (
            '{"weight_map": {"z": "model-00001-of-00002.safetensors"}}',
            "names 1 weights that its files lack: z",
        ),
    ],
)
def test_a_bad_index_is_reported(index: str, said: str, tmp_path: Path) -> None:
    """No file beside the folder is read, and nothing is loaded in part."""
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=said):
        read_weights(str(tmp_path))
