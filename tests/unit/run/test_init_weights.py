"""fit(init_weights=...): a run that starts from weights from anywhere;
and validate from a file of weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.helpers.foreign_files import lightning, saved
from tests.helpers.resuming import newest
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, Net, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.api.view import RunView
from trainkit.callbacks import ModelCheckpoint
from trainkit.errors import CheckpointError, ConfigError, TrainkitError


class Start(Callback):
    """Notes the weights, and the step, that training begins with."""

    def on_train_start(self, trainer: RunView, task: Any) -> None:
        """Copy them."""
        self.weights, self.step = weights(task), trainer.global_step


class Wider(Net):
    """Another head, and a layer more."""

    def make_model(self) -> nn.Module:
        """Return the model: 3 numbers in, 2 out."""
        model = super().make_model()
        assert isinstance(model, nn.Sequential)
        model[4] = nn.Linear(8, 2)
        model.append(nn.Linear(2, 1))
        return model


class Translating(Net):
    """Reads weights of another library: other names, and matrices the other way round."""

    def translate_weights(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return them by this Task's names."""
        if not any(name.startswith("net/") for name in weights):
            return weights
        return {
            name.replace("net/", "model."): t.T if t.dim() == 2 else t
            for name, t in weights.items()
        }


def of_another(folder: Path, task: Net) -> Path:
    """Write the weights of a task as another library would, into a folder of transformers' layout;
    return the folder.
    """
    folder.mkdir()
    state = {name.replace("model.", "net/"): tensor for name, tensor in task.state_dict().items()}
    theirs = {
        name: tensor.T.contiguous() if tensor.dim() == 2 else tensor
        for name, tensor in state.items()
    }
    safetensors.torch.save_file(theirs, folder / "model.safetensors")
    return folder


def trained() -> Net:
    """Return a task with other weights and statistics than a new one has."""
    task = Net()
    with torch.no_grad():
        for i, tensor in enumerate(task.state_dict().values()):
            tensor.copy_(torch.full_like(tensor, i + 1))
    return task


def begin(run_dir: Path, task: Any, source: Any, **options: Any) -> Start:
    """Train two steps from weights; return the initial weights."""
    start = Start()
    settings = {name: options.pop(name) for name in ("engine", "max_steps") if name in options}
    quiet(run_dir, callbacks=start, **({"max_steps": 2} | settings)).fit(
        task, loader(8), init_weights=str(source), **options
    )
    return start


def as_checkpoint(tmp_path: Path, task: Net) -> Path:
    """Write a trainkit checkpoint."""
    task.sgd = {"lr": 0.0}
    quiet(tmp_path / "first", max_steps=1, callbacks=ModelCheckpoint(save_weights_only=True)).fit(
        task, loader(8)
    )
    return newest(tmp_path / "first")


def as_safetensors(tmp_path: Path, task: Net) -> Path:
    """Write a .safetensors file."""
    safetensors.torch.save_file(dict(task.state_dict()), tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


SOURCES = {
    "checkpoint": as_checkpoint,
    "safetensors": as_safetensors,
    "state dict": lambda tmp_path, task: saved(tmp_path, task.state_dict(), "w.pt"),
    "lightning": lambda tmp_path, task: saved(tmp_path, lightning(task), "epoch=3.ckpt"),
}


FILES = ["safetensors", "state dict", "lightning"]


@pytest.mark.parametrize("write", SOURCES.values(), ids=SOURCES)
def test_a_run_starts_from_weights_from_anywhere(
    tmp_path: Path, write: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint, safetensors, a state dict and a Lightning checkpoint
    give the weights of a new run, at step 0.
    """
    task = trained()
    source = write(tmp_path, task)
    capsys.readouterr()
    start = begin(tmp_path / "run", Net(), source)
    assert torch.equal(start.weights, weights(task))
    assert start.step == 0
    assert capsys.readouterr().out == f"Weights from {source}.\n"


def test_statistics_come_with_the_weights(tmp_path: Path) -> None:
    """Buffers are loaded too."""
    task = Net()
    begin(tmp_path / "run", task, as_safetensors(tmp_path, trained()))
    assert int(task.model[1].num_batches_tracked) == int(trained().model[1].num_batches_tracked) + 2


def test_weights_that_do_not_match_are_refused_by_name(tmp_path: Path) -> None:
    """If not all weights match, the run does not start;
    the error names each mismatch, and the way out.
    """
    with pytest.raises(CheckpointError) as caught:
        begin(tmp_path / "run", Wider(), as_safetensors(tmp_path, trained()))
    said = str(caught.value)
    assert "does not fit Wider" in said
    assert "other shape: model.4.weight is [1, 8] in the file and [2, 8] in the model" in said
    assert "missing in the file: model.5.bias [1]" in said
    assert "strict=false loads the matching weights." in said


def test_what_fits_is_loaded_and_the_rest_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """strict=False loads weights that match by name and shape, lists the rest,
    and leaves it unchanged.
    """
    task, new = Wider(), Wider()
    source = as_safetensors(tmp_path, trained())
    start = begin(tmp_path / "run", task, source, strict=False)
    fitting = sum(p.numel() for p in new.model[:4].parameters())
    assert torch.equal(start.weights[:fitting], weights(trained())[:fitting])
    assert torch.equal(start.weights[fitting:], weights(new)[fitting:])
    said = capsys.readouterr().out
    assert (
        f"Weights from {source}, without those that do not match:\n  missing in the file:"
        " model.5.bias [1]\n" in said
    )
    assert said.count("\n  ") == 4


def test_no_matching_weight_is_refused_with_any_strict(tmp_path: Path) -> None:
    """Weights of another model altogether are refused, with strict=False too."""
    with pytest.raises(CheckpointError, match=r"Nothing in \S+ fits Net, by name and shape"):
        begin(
            tmp_path / "run", Net(), saved(tmp_path, {"other": torch.ones(2)}, "w.pt"), strict=False
        )


def test_an_earlier_run_stays_until_the_weights_are_read(tmp_path: Path) -> None:
    """A path that is not there moves nothing aside; weights may be of the run in the folder."""
    first = Net()
    quiet(tmp_path, max_steps=1, enable_checkpointing=True).fit(first, loader(8))
    own = tmp_path / "checkpoints" / "last"
    with pytest.raises(CheckpointError, match="is not there"):
        quiet(tmp_path, max_steps=1).fit(Net(), loader(8), init_weights=tmp_path / "lost")
    assert own.is_dir()
    start = Start()
    quiet(tmp_path, max_steps=1, callbacks=start).fit(Net(), loader(8), init_weights=own)
    assert start.weights.equal(weights(first))
    assert not own.exists()


@pytest.mark.parametrize("key", ["ckpt_path", "init_weights"])
def test_what_names_no_file_is_refused(tmp_path: Path, key: str) -> None:
    """transformers takes resume_from_checkpoint=True."""
    with pytest.raises(ConfigError, match=f"{key} is true; it must be .*a path"):
        quiet(tmp_path, max_steps=1).fit(Net(), loader(8), **{key: True})


def test_a_resumed_checkpoint_takes_precedence(tmp_path: Path) -> None:
    """With "auto", the first start takes the weights and each later
    one resumes from the run's own checkpoint.
    """
    source = as_safetensors(tmp_path, trained())
    task = Net()
    start, keeper = Start(), ModelCheckpoint()
    trainer = quiet(tmp_path / "run", max_steps=2, callbacks=[start, keeper])
    trainer.fit(task, loader(8), ckpt_path="auto", init_weights=str(source))
    assert torch.equal(start.weights, weights(trained()))
    trainer = quiet(tmp_path / "run", max_steps=4, callbacks=[start, keeper])
    trainer.fit(Net(), loader(16), ckpt_path="auto", init_weights=str(source))
    assert (start.step, trainer.global_step) == (2, 4)
    assert torch.equal(start.weights, weights(task))


def test_a_resumed_run_does_not_read_the_weights(tmp_path: Path) -> None:
    """A file that is gone by the time of a restart does not matter."""
    source = as_safetensors(tmp_path, trained())
    quiet(tmp_path / "run", max_steps=2, enable_checkpointing=True).fit(
        Net(), loader(8), init_weights=str(source)
    )
    source.unlink()
    trainer = quiet(tmp_path / "run", max_steps=3)
    trainer.fit(Net(), loader(16), ckpt_path="auto", init_weights=str(source))
    assert trainer.global_step == 3


def test_all_ranks_start_from_what_rank_0_has_read(tmp_path: Path) -> None:
    """One rank reads; a mistake is raised on all."""
    source = as_safetensors(tmp_path, trained())

    def work(engine: ThreadEngine) -> torch.Tensor:
        start = begin(tmp_path / "run", Net(), source, engine=engine)
        return start.weights

    for found in World(2).run(work):
        assert torch.equal(found, weights(trained()))

    def fails(engine: ThreadEngine) -> str:
        with pytest.raises(TrainkitError) as caught:
            begin(tmp_path / "run", Net(), tmp_path / "gone.pt", engine=engine)
        return str(caught.value)

    first, second = World(2).run(fails)
    assert first == second
    assert "gone.pt is not there; it must be" in first


@pytest.mark.parametrize("write", [SOURCES[kind] for kind in FILES], ids=FILES)
def test_a_file_of_weights_is_validated(tmp_path: Path, write: Any) -> None:
    """validate(ckpt_path=FILE) evaluates these weights, statistics included."""
    task, other = trained(), Net()
    source = str(write(tmp_path, task))
    values = quiet(tmp_path / "file").validate(other, loader(11), ckpt_path=source)
    assert values == quiet(tmp_path / "task").validate(task, loader(11))
    assert torch.equal(weights(other), weights(task))


def test_a_file_that_does_not_fit_is_not_validated(tmp_path: Path) -> None:
    """All of a file must fit the task that is validated."""
    with pytest.raises(CheckpointError, match="does not fit Line|Nothing in"):
        quiet(tmp_path).validate(
            Line(), loader(11), ckpt_path=str(as_safetensors(tmp_path, trained()))
        )


def test_a_task_translates_weights_of_others(tmp_path: Path) -> None:
    """`translate_weights` renames and turns them;
    checkpoints of the Task's own pass through it unchanged.
    """
    start = begin(tmp_path / "run", Translating(), of_another(tmp_path / "theirs", trained()))
    assert torch.equal(start.weights, weights(trained()))
    again = begin(tmp_path / "again", Translating(), as_checkpoint(tmp_path, trained()))
    assert torch.equal(again.weights, weights(trained()))


def test_weights_of_others_are_evaluated_and_loaded(tmp_path: Path) -> None:
    """validate of a file and load_from_checkpoint of a file or a folder translate too."""
    folder = of_another(tmp_path / "theirs", trained())
    task = Translating()
    quiet(tmp_path / "run").validate(task, loader(8), ckpt_path=str(folder / "model.safetensors"))
    assert torch.equal(weights(task), weights(trained()))
    for source in (folder, folder / "model.safetensors"):
        assert torch.equal(weights(Translating.load_from_checkpoint(source)), weights(trained()))


class WithHeads(Translating):
    """Compares the number of heads with that of a folder's config."""

    def compare_config(self, config: Mapping[str, Any]) -> list[str]:
        """Return a line if it is another than 4."""
        heads = config.get("n_head", 4)
        return [] if heads == 4 else [f"n_head is {heads} in config.json, and 4 here"]


@pytest.mark.parametrize("heads", [4, 8, None])
def test_weights_that_would_compute_something_else_are_refused(
    heads: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the config.json beside them; strict=false loads them, and says so."""
    folder = of_another(tmp_path / "theirs", trained())
    file = folder / "model.safetensors"
    if heads is not None:
        (folder / "config.json").write_text(json.dumps({"n_head": heads}))
    if heads != 8:
        assert torch.equal(begin(tmp_path / "run", WithHeads(), file).weights, weights(trained()))
        return
    for refused in (
        lambda: begin(tmp_path / "run", WithHeads(), folder),
        lambda: begin(tmp_path / "run", WithHeads(), file),
        lambda: WithHeads.load_from_checkpoint(folder),
        lambda: quiet(tmp_path / "val").validate(WithHeads(), loader(8), ckpt_path=str(file)),
    ):
        with pytest.raises(CheckpointError, match="n_head is 8 in config.json, and 4 here"):
            refused()
    assert torch.equal(
        begin(tmp_path / "run", WithHeads(), folder, strict=False).weights, weights(trained())
    )
    assert "n_head is 8 in config.json, and 4 here" in capsys.readouterr().out


def test_a_damaged_config_is_an_error_in_words(tmp_path: Path) -> None:
    """With the file's name."""
    folder = of_another(tmp_path / "theirs", trained())
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is damaged"):
        begin(tmp_path / "run", WithHeads(), folder)


def test_weights_at_a_url_that_cannot_be_read_are_an_error_in_words(tmp_path: Path) -> None:
    """Without a traceback of the URL's library."""
    with pytest.raises(
        CheckpointError, match="'memory://nowhere/x' cannot be read: FileNotFoundError"
    ):
        begin(tmp_path, Net(), "memory://nowhere/x")
