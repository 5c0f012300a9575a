"""format=huggingface: a folder that the Task writes itself,
read back and compared before it appears.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from tests.helpers.toy import Line
from trainkit.errors import CheckpointError, ConfigError, TaskError
from trainkit.extensions.exporting.export import export

X = torch.randn(4, 3)


class Ours(Line):
    """A Task with a form in another library:
    the matrix is turned, and scaled by `fault` in `export_huggingface`.
    """

    fault = 1.0

    def translate_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Read it."""
        return {f"model.{name}": t.T if name == "weight" else t for name, t in weights.items()}

    def export_huggingface(self, folder: Path) -> None:
        """Write it."""
        (folder / "config.json").write_text(json.dumps({"model_type": "line"}))
        state = {
            "weight": self.fault * self.model.weight.detach().T.contiguous(),
            "bias": self.model.bias.detach(),
        }
        safetensors.torch.save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize("rebuilt", [False, True])
def test_the_folder_is_written_and_read_back(rebuilt: bool, tmp_path: Path) -> None:
    """Bit for bit the same outputs, of the Task itself or of a second one;
    an earlier folder is replaced as a whole.
    """
    (tmp_path / "line").mkdir()
    for _ in range(2):
        done = export(
            Ours(), tmp_path / "line", "huggingface", X, rebuilt=Ours() if rebuilt else None
        )
        assert (done.path, done.difference, done.batch_sizes) == (tmp_path / "line", 0.0, [4, 5])
        assert done.num_bytes == sum(file.stat().st_size for file in done.path.iterdir())
        assert sorted(file.name for file in tmp_path.rglob("*")) == [
            "config.json",
            "line",
            "model.safetensors",
        ]
        (done.path / "left.bin").touch()  # of the first one


def test_a_folder_of_other_outputs_is_not_written(tmp_path: Path) -> None:
    """A translation that does not lead back is an error, and the earlier folder stays."""
    export(Ours(), tmp_path / "line", "huggingface", X)
    before = (tmp_path / "line" / "model.safetensors").read_bytes()
    wrong = Ours()
    wrong.fault = 1.001
    with pytest.raises(
        TaskError, match="The outputs of the format=huggingface file differ from Ours.forward"
    ):
        export(wrong, tmp_path / "line", "huggingface", X)
    assert (tmp_path / "line" / "model.safetensors").read_bytes() == before
    with pytest.raises(CheckpointError, match="Nothing in .* fits Wide"):
        export(Ours(), tmp_path / "other", "huggingface", X, rebuilt=Wide())
    assert [path.name for path in tmp_path.iterdir()] == ["line"]


class Wide(Ours):
    """Of another size."""

    def make_model(self) -> Any:
        """Return the model: 3 numbers in, 2 out."""
        return torch.nn.Linear(3, 2)


def test_a_task_without_such_a_form_says_so(tmp_path: Path) -> None:
    """The error names the method to write."""
    with pytest.raises(
        TaskError,
        match=r"Line has no export_huggingface\(\).*writes config.json and model.safetensors",
    ):
        export(Line(), tmp_path / "line", "huggingface", X)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["file", "folder of others"])
def test_nothing_else_is_replaced(what: str, tmp_path: Path) -> None:
    """Only an empty folder, or one of transformers."""
    place = tmp_path / "mine"
    if what == "file":
        place.touch()
    else:
        place.mkdir()
        (place / "work.txt").touch()
    with pytest.raises(
        ConfigError,
        match="which holds something other than a model of transformers.*Give a new folder",
    ):
        export(Ours(), place, "huggingface", X)
    with pytest.raises(
        ConfigError, match="absent does not exist. Create it, or give another place"
    ):
        export(Ours(), tmp_path / "absent" / "mine", "huggingface", X)
