"""A Task's forward as a file: it computes what the Task computes, or it is not written."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torchvision
from torch import Tensor, nn

from recipes.gpt import GPT, LanguageModel
from recipes.image_classifier import ImageClassifier
from tests.helpers import toy
from trainkit.api.task import Task
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.exporting import onnx
from trainkit.extensions.exporting.export import export

SUFFIXES = {"safetensors": ".safetensors", "torch_export": ".pt2", "onnx": ".onnx"}
GRAPHS = ["torch_export", "onnx"]


def answer(path: Path, task: Task, *args: Tensor) -> Tensor:
    """Return a file's output, computed by its format's own library;
    safetensors by a strict load into the task.
    """
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [entry.name for entry in session.get_inputs()]
        return torch.from_numpy(
            session.run(None, {n: a.numpy() for n, a in zip(names, args, strict=True)})[0]
        )
    with torch.no_grad():
        if path.suffix == ".pt2":
            return torch.export.load(path).module()(*args)
        task.load_state_dict(safetensors.torch.load_file(path))
        return task.eval()(*args)


class Own(toy.Line):
    """Line with its own forward: `Own.of(function)`."""

    def __init__(self, function: Any = None) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        """Return the function's result on the model's output and the arguments."""
        return self.function(self.model(args[0]), *args)


@pytest.mark.parametrize("kind", SUFFIXES)
def test_a_file_computes_what_the_task_computes(kind: str, tmp_path: Path) -> None:
    """A trained Task with batch norm and dropout is written in evaluation mode,
    for batches of any size.
    """
    task = toy.Net()
    toy.quiet(tmp_path, max_epochs=2).fit(task, toy.loader())
    done = export(task, tmp_path / f"net{SUFFIXES[kind]}", kind, torch.randn(4, 3))
    assert (done.any_batch_size, done.batch_sizes) == (True, [4, 5])
    assert done.num_bytes == done.path.stat().st_size > 0
    assert done.difference < 1e-6
    x = torch.randn(17, 3)
    expected = task.eval()(x).detach()
    assert torch.allclose(answer(done.path, toy.Net(), x), expected, atol=1e-6)


class Part(Tensor):
    """A weight that is spread over ranks, as DTensor."""

    def to_local(self) -> Tensor:
        """Return this rank's part."""
        return self.as_subclass(Tensor)


@pytest.mark.parametrize("kind", ["safetensors", "torch_export"])
@pytest.mark.parametrize("is_spread", [True, False])
def test_parts_of_weights_are_refused(is_spread: bool, kind: str, tmp_path: Path) -> None:
    """Those of engine=fsdp, and of another stage; it says what to export."""
    task = toy.Line()
    own = torch.ones(1, 3).as_subclass(Part) if is_spread else torch.ones(1, 3, device="meta")
    task.model.weight = nn.Parameter(own)
    with pytest.raises(
        TaskError, match=rf"each rank holds a part .* ckpt_path=last format={kind}; or, in a script"
    ):
        export(task, tmp_path / f"model{SUFFIXES[kind]}", kind, torch.ones(4, 3))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", SUFFIXES)
def test_the_task_is_left_as_it_was(kind: str, tmp_path: Path) -> None:
    """Weights, gradients and each module's mode are unchanged."""
    task = toy.Net()
    task.model[1].eval()
    task(torch.randn(4, 3)).sum().backward()
    modes = [module.training for module in task.modules()]
    state = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    grads = [p.grad for p in task.parameters()]
    export(task, tmp_path / f"net{SUFFIXES[kind]}", kind, torch.randn(4, 3))
    assert [module.training for module in task.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in task.state_dict().items())
    assert all(a is b.grad for a, b in zip(grads, task.parameters(), strict=True))


@pytest.mark.parametrize("kind", SUFFIXES)
def test_tied_weights_are_written_once(kind: str, tmp_path: Path) -> None:
    """A language model with tied weights needs the space of one of them, and is correct."""
    task = LanguageModel(GPT(context=8, width=64, depth=1, heads=2), torch.optim.SGD)
    once = sum(p.numel() * 4 for p in task.parameters())
    done = export(task, tmp_path / f"gpt{SUFFIXES[kind]}", kind)  # with the Task's own example
    assert once <= done.num_bytes < once + 256 * 64 * 4
    assert done.difference < 1e-5


@pytest.mark.parametrize("kind", GRAPHS)
def test_a_residual_network_is_exported(kind: str, tmp_path: Path) -> None:
    """A convolutional network of torchvision passes both tracers."""
    task = ImageClassifier(torchvision.models.resnet18(num_classes=3), torch.optim.SGD)
    done = export(task, tmp_path / f"net{SUFFIXES[kind]}", kind, torch.randn(2, 3, 32, 32))
    assert done.any_batch_size
    assert done.difference < 1e-4


@pytest.mark.parametrize("kind", SUFFIXES)
def test_several_arguments_and_answers(kind: str, tmp_path: Path) -> None:
    """forward may take several tensors, one of them not a batch, and return several."""
    task = Own(lambda y, x, z, scale, unused: {"sum": y + z, "scaled": (x * scale, y.argmax(1))})
    example = (torch.randn(3, 3), torch.randn(3, 1), torch.rand(1) + 2, torch.zeros(3))
    assert export(task, tmp_path / f"own{SUFFIXES[kind]}", kind, example).batch_sizes == [3, 4]


@pytest.mark.parametrize("kind", GRAPHS)
def test_an_example_of_one_sample_leaves_the_size_open(kind: str, tmp_path: Path) -> None:
    """One sample is enough of an example."""
    done = export(toy.Line(), tmp_path / f"line{SUFFIXES[kind]}", kind, torch.randn(1, 3))
    assert done.any_batch_size
    assert answer(done.path, toy.Line(), torch.randn(5, 3)).shape == (5, 1)


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_forward_for_one_batch_size_is_written_for_it(
    kind: str, rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the size cannot be dynamic, the file accepts the example's, and a line says so."""
    task = Own(lambda y, x: y.reshape(rows, 1) + x.reshape(rows, 3))
    done = export(task, tmp_path / f"own{SUFFIXES[kind]}", kind, torch.randn(rows, 3))
    assert (done.any_batch_size, done.batch_sizes) == (False, [rows])
    assert (
        f"The file accepts only batches of {rows}; torch.export cannot make the size dynamic: "
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("kind", GRAPHS)
def test_a_file_has_nothing_of_this_machine(kind: str, tmp_path: Path) -> None:
    """It contains no path of a source file, nor of its own folder."""
    done = export(toy.Net(), tmp_path / f"net{SUFFIXES[kind]}", kind, torch.randn(4, 3))
    content = done.path.read_bytes()
    for place in (Path(toy.__file__).parent, Path(nn.__file__).parent, tmp_path):
        assert str(place).encode() not in content


@pytest.mark.parametrize("kind", SUFFIXES)
def test_a_file_is_there_for_whom_the_umask_lets(kind: str, tmp_path: Path) -> None:
    """The file has the permissions of any newly written file."""
    (tmp_path / "any").touch()
    done = export(toy.Line(), tmp_path / f"line{SUFFIXES[kind]}", kind, torch.randn(4, 3))
    assert done.path.stat().st_mode == (tmp_path / "any").stat().st_mode


def test_half_precision_is_compared_as_such(tmp_path: Path) -> None:
    """A Task in bfloat16 is exported in bfloat16."""
    done = export(
        toy.Line().bfloat16(), tmp_path / "line.pt2", "torch_export", torch.randn(4, 3).bfloat16()
    )
    assert answer(done.path, toy.Line(), torch.randn(2, 3).bfloat16()).dtype == torch.bfloat16


# -- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GRAPHS)
def test_a_file_that_computes_something_else_is_not_there(kind: str, tmp_path: Path) -> None:
    """A forward that behaves differently during tracing is detected;
    the older file stays, and nothing else.
    """
    path = tmp_path / f"own{SUFFIXES[kind]}"
    path.write_text("the older one")
    task = Own(lambda y, x: y + 1 if torch.compiler.is_exporting() else y)
    with pytest.raises(
        TaskError, match=r"differ from Own.forward: on 4 samples the largest difference is 1,"
    ):
        export(task, path, kind, torch.randn(4, 3))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "the older one"


def test_a_state_beside_the_weights_is_found_out(tmp_path: Path) -> None:
    """State outside of weights and buffers is not in safetensors:
    a newly built Task differs, by however little.
    """
    task, rebuilt = Own(lambda y, x: y + task.offset), Own(lambda y, x: y + rebuilt.offset)
    task.offset, rebuilt.offset = 1e-6, 0.0
    with pytest.raises(
        TaskError,
        match=r"largest difference is .*e-0[67], and it must be at most 0. Nothing was written",
    ):
        export(task, tmp_path / "own.safetensors", example_input=torch.zeros(4, 3), rebuilt=rebuilt)
    assert list(tmp_path.iterdir()) == []
    rebuilt.offset = 1e-6
    assert (
        export(
            task, tmp_path / "own.safetensors", example_input=torch.zeros(4, 3), rebuilt=rebuilt
        ).difference
        == 0
    )


@pytest.mark.parametrize("kind", GRAPHS)
def test_a_forward_that_cannot_be_traced_is_reported(kind: str, tmp_path: Path) -> None:
    """A branch on values ends in trainkit's error, and leaves no file;
    the weights alone can still be written.
    """
    task = Own(lambda y, x: y if float(x.sum()) > 0 else -y)
    with pytest.raises(
        TaskError,
        match=r"Own.forward cannot be traced by torch.export: .*torch.where.*format=safetensors",
    ):
        export(task, tmp_path / f"own{SUFFIXES[kind]}", kind, torch.randn(4, 3))
    assert list(tmp_path.iterdir()) == []
    export(task, tmp_path / "own.safetensors", "safetensors", torch.randn(4, 3))


def test_what_has_no_form_in_onnx_is_refused(tmp_path: Path) -> None:
    """An operator that ONNX lacks ends in trainkit's error, and leaves no file."""
    task = Own(lambda y, x: torch.linalg.eigvalsh(x.T @ x) + y)
    with pytest.raises(
        TaskError, match=r"Own.forward has no ONNX equivalent: .*Use format=torch_export."
    ):
        export(task, tmp_path / "own.onnx", "onnx", torch.randn(4, 3))
    assert list(tmp_path.iterdir()) == []


def test_what_one_onnx_file_cannot_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More weights than protobuf allows are refused before tracing."""
    monkeypatch.setattr(onnx, "_MOST_BYTES", 15)
    with pytest.raises(
        TaskError,
        match="Line has 0.0 GiB of weights; an ONNX file holds at most 2. Use format=torch_export",
    ):
        export(toy.Line(), tmp_path / "line.onnx", "onnx", torch.randn(4, 3))


class Silent(Task):
    """A Task without forward."""


class Empty(Task):
    """A Task without weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        return x


class Talkative(toy.Line):
    """A Task with a text in its state."""

    def get_extra_state(self) -> str:
        """Return the text."""
        return "hello"

    def set_extra_state(self, state: str) -> None:
        """Forget it."""


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Silent(), r"Silent has no forward\(\).*Define it: `def forward\(self, x\)"),
        (Empty(), "Empty has no weights; format=safetensors writes tensors"),
        (Talkative(), "Talkative holds '_extra_state', which is no tensor"),
        (
            Own(lambda y, x: torch.nn.functional.dropout(y + 1)),
            "Own.forward gives two outputs for one input in evaluation mode",
        ),
        (Own(lambda y, x: "text"), "Own returned a str"),
        (Own(lambda y, x: None), "Own returned no tensor"),
    ],
)
def test_a_task_that_cannot_be_exported_is_refused(task: Task, words: str, tmp_path: Path) -> None:
    """The missing part is named, with the code to add."""
    with pytest.raises(TaskError, match=words):
        export(task, tmp_path / "x.safetensors", "safetensors", torch.randn(4, 3))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (
            None,
            (
                r"Line.example_input_array is of type NoneType; it must be a tensor or a tuple of"
                r" tensors"
            ),
        ),
        ({"x": torch.zeros(1)}, "example_input is of type dict"),
        ((torch.zeros(1, 3), 3), "example_input is of type Tensor, int"),
        ((), "example_input is of type empty tuple"),
        (torch.zeros(0, 3), r"example_input has no samples: its first tensor has shape \[0, 3\]"),
        (torch.tensor(1.0), r"example_input has no samples: its first tensor has shape \[\]"),
    ],
)
def test_an_example_of_another_kind_is_refused(example: Any, words: str, tmp_path: Path) -> None:
    """An example that is no batch of tensors is refused with its type or shape."""
    with pytest.raises(ConfigError, match=words):
        export(toy.Line(), tmp_path / "x.safetensors", "safetensors", example)


@pytest.mark.parametrize(
    ("output", "kind", "words"),
    [
        (
            "a.onnx",
            "onxx",
            (
                "format is 'onxx'; it must be one of safetensors, huggingface, peft, torch_export, onnx."
                " Did you mean 'onnx'?"
            ),
        ),
        ("a.pt", "torch_export", "a.pt'; for format=torch_export its name must end in .pt2."),
        (
            "a.pt2",
            "safetensors",
            "a.pt2'; for format=safetensors its name must end in .safetensors.",
        ),
        ("no/a.onnx", "onnx", "and the folder "),
        (".", "onnx", "which is a folder; it must be a file, for example "),
    ],
)
def test_an_output_that_cannot_be_is_refused(
    output: str, kind: str, words: str, tmp_path: Path
) -> None:
    """Format and file are checked before anything runs."""
    with pytest.raises(ConfigError) as caught:
        export(toy.Line(), tmp_path / output, kind, torch.randn(4, 3))
    assert words in str(caught.value)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """format=onnx without its packages names the extra to install;
    the other formats do not need them.
    """
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if "onnx" in name else there(name, *a)
    )
    with pytest.raises(
        ConfigError,
        match=r"format=onnx needs onnx, onnxscript, onnxruntime, which are not installed.*pip inst",
    ):
        export(toy.Line(), tmp_path / "x.onnx", "onnx", torch.randn(4, 3))
    export(toy.Line(), tmp_path / "x.pt2", "torch_export", torch.randn(4, 3))
