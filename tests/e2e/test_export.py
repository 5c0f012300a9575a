"""`python -m trainkit export`: from a run that was trained to a file that its own library reads."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import safetensors.torch
import torch

from recipes.digits import Digits
from recipes.mlp import MLP
from tests.helpers.launching import run_command


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a small run was trained."""
    folder = tmp_path_factory.mktemp("export")
    done = run_command("python -m trainkit fit conf=mlp trainer.max_epochs=2 logger=csv", folder)
    assert done.code == 0, done.text
    return folder


def files(place: Path) -> Path:
    """Return the folder of the run's exported files."""
    (run,) = (place / "runs" / "mlp").iterdir()
    return run / "export"


def accuracy(logits: torch.Tensor) -> float:
    """Return the share of the validation digits that are classified correctly."""
    return float((logits.argmax(1) == digits()[1]).float().mean())


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return all validation images of conf=mlp and their labels."""
    data = Digits(batch_size=10_000, image_size=8)
    data.setup("fit")
    images, labels = next(iter(data.val_dataloader()))
    return images, labels


@pytest.mark.parametrize("kind", ["onnx", "safetensors", "torch_export"])
def test_a_trained_run_is_exported(kind: str, place: Path) -> None:
    """The exported file classifies most digits correctly in its own library,
    at a batch size that was not exported.
    """
    done = run_command(f"python -m trainkit export ckpt_path=best format={kind}", place)
    assert done.code == 0, done.text
    assert done.err == ""
    assert "the newest one with checkpoints" in done.out
    assert "on batches of 2 and 3 samples: " in done.out
    images, _ = digits()
    if kind == "onnx":
        session = onnxruntime.InferenceSession(
            files(place) / "mlp.onnx", providers=["CPUExecutionProvider"]
        )
        logits = torch.from_numpy(
            session.run(None, {session.get_inputs()[0].name: images.numpy()})[0]
        )
    elif kind == "torch_export":
        logits = torch.export.load(files(place) / "mlp.pt2").module()(images)
    else:
        model = MLP(192, 10)
        state = safetensors.torch.load_file(files(place) / "mlp.safetensors")
        model.load_state_dict(
            {name.removeprefix("model."): tensor for name, tensor in state.items()}
        )
        logits = model(images)
    assert accuracy(logits) > 0.8


def test_a_mistake_is_a_sentence(place: Path) -> None:
    """An unknown setting ends with exit code 2, a missing checkpoint with 1,
    neither with a traceback.
    """
    wrong = run_command("python -m trainkit export ckpt_path=best fromat=onnx", place)
    assert wrong.code == 2
    assert wrong.err.startswith(
        "Error: 'fromat' is no setting of export. Did you mean 'format'? Use ckpt_path,"
    ), wrong.text
    absent = run_command("python -m trainkit export ckpt_path=last run_dir=.", place)
    assert (absent.code, len(absent.err.splitlines())) == (1, 1), absent.text
    assert "there are no checkpoints there" in absent.err


def test_a_run_from_python_is_exported_from_python(place: Path) -> None:
    """A run without a config is refused with the function to call,
    and that function writes the file.
    """
    code = (
        "import torch, trainkit; from tests.helpers import toy; from"
        " trainkit.extensions.exporting.export import export; "
    )
    code += (
        "task = toy.Line(); trainer = trainkit.Trainer(run_dir='own', max_epochs=1, logger=False); "
    )
    code += "trainer.fit(task, toy.loader()); "
    code += "print(export(task, 'own.onnx', 'onnx', torch.randn(4, 3)).batch_sizes)"
    made = run_command(f'python -c "{code}"', place, PYTHONPATH=str(Path(__file__).parents[2]))
    assert made.code == 0, made.text
    assert made.out.splitlines()[-1] == "[4, 5]"
    refused = run_command("python -m trainkit export ckpt_path=last run_dir=own", place)
    assert refused.code == 1
    assert "trainkit.export(task, 'model.onnx', format='onnx', example_input=x)" in refused.err, (
        refused.text
    )
