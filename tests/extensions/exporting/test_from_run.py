"""Export from a run's checkpoint:
which checkpoint, what may be built from its manifest, which example.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.image_classifier import ImageClassifier
from recipes.mlp import MLP
from trainkit.checkpoint import format as ckpt
from trainkit.errors import CheckpointError, ConfigError, TaskError
from trainkit.extensions.exporting.from_run import export_run
from trainkit.extensions.exporting.places import default_checkpoint, has_checkpoints

CONFIG: dict[str, Any] = {
    "conf": "tiny",
    "seed": 0,
    "run_dir": "/of/another/machine",
    "ckpt_path": None,
    "engine": {"_target_": "trainkit.engine.horovod.engine.HorovodEngine"},
    "trainer": {"max_epochs": 1},
    "task": {
        "_target_": "recipes.image_classifier.ImageClassifier",
        "model": {
            "_target_": "recipes.mlp.MLP",
            "num_inputs": 192,
            "num_classes": 10,
            "width": 4,
            "depth": 1,
        },
        "optimizer": {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1},
    },
    "data": {"_target_": "recipes.digits.Digits", "batch_size": 8, "image_size": 8},
    "callbacks": {},
    "logger": {},
}
USERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import trainkit

class Mine(trainkit.Task):
    def __init__(self, batch="pair"):
        super().__init__()
        self.net, self.batch = torch.nn.Linear(3, 1), batch
    def forward(self, x):
        return self.net(x)
    def val_dataloader(self):
        x = torch.randn(8, 3)
        return {
            "pair": DataLoader(TensorDataset(x, x), 4), "several": [DataLoader(TensorDataset(x, x), 4)],
            "one": DataLoader(x, 4), "set": TensorDataset(x, x), "list": [(x, x)],
            "dict": [{"x": x}], "text": ["abc"], "nothing": None, "empty": [],
        }[self.batch]
"""


def config(**changes: Any) -> dict[str, Any]:
    """Return CONFIG with dotted keys changed, as task__model__width=8."""
    changed = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        *path, last = key.split("__")
        node = changed
        for part in path:
            node = node[part]
        node[last] = value
    return changed


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module of the user's, which a file of conf/ names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "users_task", raising=False)
    (tmp_path / "users_task.py").write_text(USERS)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("task: {_target_: users_task.Mine}\n")
    return tmp_path


def users(batch: str) -> dict[str, Any]:
    """Return a config of the user's own Task."""
    return {"seed": 0, "task": {"_target_": "users_task.Mine", "batch": batch}}


def run(
    folder: Path,
    about: Any = CONFIG,
    name: str = "epoch=0-step=3",
    model: torch.nn.Module | None = None,
) -> Path:
    """Create a run's folder with one checkpoint, best and last, and return it."""
    place = folder / "checkpoints" / name
    place.mkdir(parents=True)
    if model is None:
        of_users = isinstance(about, dict) and "users_task" in str(about)
        model = torch.nn.ModuleDict({"net": torch.nn.Linear(3, 1)}) if of_users else classifier()
    manifest = {"epoch": 0, "global_step": 3, "config": about}
    ckpt.write(place, ckpt.Snapshot(*ckpt.find_aliases(model.state_dict()), None, manifest))
    for link in ("last", "best"):
        (folder / "checkpoints" / link).unlink(missing_ok=True)
        (folder / "checkpoints" / link).symlink_to(name)
    return folder


def classifier(width: int = 4) -> ImageClassifier:
    """Return the Task of CONFIG, with other weights than it starts from."""
    torch.manual_seed(77)
    return ImageClassifier(MLP(192, 10, width, 1), torch.optim.SGD)


def exported(run_dir: Path | None = None, ckpt_path: str = "last", **options: Any) -> None:
    """Export as safetensors, unless `options` set another format."""
    asked = {"format": "safetensors", "output": None, "trust": []} | options
    export_run(ckpt_path, str(run_dir) if run_dir else None, **asked)


def test_the_weights_of_the_checkpoint_are_exported(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file holds the checkpoint's weights, not the task's initial ones;
    the check is printed.
    """
    exported(run(here / "mine"))
    state = ckpt.read_state(here / "mine" / "checkpoints" / "last")
    weights = ckpt.safe_open(here / "mine" / "export" / "tiny.safetensors", "pt")
    assert sorted(weights.keys()) == sorted(state)
    assert all(torch.equal(weights.get_tensor(name), tensor) for name, tensor in state.items())
    size = (here / "mine" / "export" / "tiny.safetensors").stat().st_size
    assert capsys.readouterr().out.splitlines() == [
        "checkpoint  mine/checkpoints/epoch=0-step=3 (epoch 0, step 3)",
        f"wrote       mine/export/tiny.safetensors, {size:,} bytes",
        (
            "checked     a newly built Task against ImageClassifier.forward on batches of 2 and 3"
            " samples: equal bit for bit"
        ),
    ]


# -- which checkpoint ---------------------------------------------------------------------------------------------------


def test_the_newest_run_is_taken_and_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without run_dir, the run with the newest checkpoint is used, at any depth below runs/."""
    for name, time in (("runs/a/1", 30), ("runs/b/sweep/0", 40), ("runs/c/1", 20)):
        manifest = run(here / name) / "checkpoints" / "last" / "manifest.json"
        os.utime(manifest, (time, time))
    exported()
    assert capsys.readouterr().out.startswith(
        "run         runs/b/sweep/0, the newest one with checkpoints"
    )
    assert (here / "runs/b/sweep/0/export/tiny.safetensors").is_file()


def test_a_checkpoint_by_its_folder(here: Path) -> None:
    """A folder is used as given; the file is written into its run, or to `output`."""
    folder = run(here / "mine") / "checkpoints" / "epoch=0-step=3"
    exported(ckpt_path=str(folder))
    assert (here / "mine" / "export" / "tiny.safetensors").is_file()
    exported(ckpt_path=str(folder.rename(here / "alone")), output="there.safetensors")
    assert (here / "there.safetensors").is_file()


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        ({}, ConfigError, "There is no run with checkpoints in runs/. Name one: run_dir=..."),
        ({"run_dir": Path("absent")}, ConfigError, "run_dir is 'absent', which does not exist."),
        (
            {"run_dir": Path("empty")},
            CheckpointError,
            "empty/checkpoints has no 'last'; there are no checkpoints there",
        ),
        (
            {"run_dir": Path("other"), "ckpt_path": "best"},
            CheckpointError,
            "has no 'best'; there are epoch=0-step=3, last",
        ),
        (
            {"ckpt_path": "other"},
            CheckpointError,
            "ckpt_path is 'other'; it must be best, last, or a checkpoint's folder",
        ),
    ],
)
def test_a_missing_checkpoint_is_named(
    asked: dict[str, Any], kind: type, words: str, here: Path
) -> None:
    """The existing checkpoints are named."""
    (here / "empty").mkdir()
    (run(here / "other") / "checkpoints" / "best").unlink()
    with pytest.raises(kind) as caught:
        exported(**asked)
    assert words in str(caught.value)


def test_checkpoints_elsewhere_are_looked_for(here: Path) -> None:
    """In the folder that the run's callback has as dirpath; of those at a URL the error says what to
    do.
    """
    policy = {"_target_": "trainkit.callbacks.ModelCheckpoint", "dirpath": str(here / "big")}
    mine = run(here / "mine")
    (mine / "config.yaml").write_text(json.dumps({"callbacks": {"checkpoint": policy}}))
    (mine / "checkpoints").rename(here / "big")
    assert has_checkpoints(mine) and default_checkpoint(mine) == "best"
    (here / "big" / "best").unlink()
    assert default_checkpoint(mine) == "last"
    exported(mine)
    assert (mine / "export" / "tiny.safetensors").is_file()
    policy["dirpath"] = "s3://bucket/run"
    (mine / "config.yaml").write_text(json.dumps({"callbacks": {"checkpoint": policy}}))
    for asked in ("best", "s3://bucket/run/last"):
        with pytest.raises(CheckpointError, match="s3://bucket/run.* copy one to this machine"):
            exported(mine, ckpt_path=asked)


def test_a_damaged_checkpoint_is_not_exported(here: Path) -> None:
    """A flipped bit is found before anything is built."""
    path = run(here / "mine") / "checkpoints" / "last" / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is not what was written"):
        exported(here / "mine")


def test_weights_that_do_not_fit_the_config_leave_nothing(here: Path) -> None:
    """A checkpoint of another model is reported tensor by tensor, and no folder is left."""
    run(here / "mine", model=classifier(width=5))
    with pytest.raises(
        CheckpointError,
        match=r"other shape: model.1.weight is \[5, 192\] in the file and \[4, 192\]",
    ):
        exported(here / "mine")
    assert not (here / "mine" / "export").exists()


# -- what a manifest's config may do ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("about", "kind", "words"),
    [
        (None, CheckpointError, "is from a run in Python code.*trainkit.export"),
        ([1], CheckpointError, "is from a run in Python code"),
        ({}, ConfigError, "There is no task"),
        (config(tsak=3), ConfigError, "tsak.*task"),
        (config(task__model__width="wide"), ConfigError, "task.model.width is 'wide'"),
        (
            config(task={"_target_": "os.system", "command": "touch mark"}),
            ConfigError,
            "'os.system', which configs may not call",
        ),
        (
            config(task__model={"_target_": "builtins.eval"}),
            ConfigError,
            "task.model._target_ is 'builtins.eval'",
        ),
        (
            config(data={"_target_": "subprocess.run", "args": "x"}),
            ConfigError,
            "data._target_ is 'subprocess.run'",
        ),
        (config(task={"_target_": "torch.hub.load"}), ConfigError, "which configs may not call"),
        (
            config(task=CONFIG["task"]["model"]),
            ConfigError,
            "task has a MLP; it must be a trainkit.Task",
        ),
        (
            config(data=CONFIG["task"]["model"]),
            ConfigError,
            "data has a MLP; it must be a trainkit.DataModule",
        ),
    ],
)
def test_a_manifest_may_name_what_a_config_may(
    about: Any, kind: type, words: str, here: Path
) -> None:
    """Whatever a config may not name or build, a manifest may not either;
    nothing runs and nothing is written.
    """
    run(here / "mine", about)
    with pytest.raises(kind, match=words):
        exported(here / "mine")
    assert not (here / "mark").exists()
    assert not (here / "mine" / "export").exists()


def test_trust_is_given_at_the_command_line_alone(here: Path) -> None:
    """A manifest's own `trust` does not count; the user's does."""
    about = config(task={"_target_": "tests.helpers.toy.Line"}, trust=["tests"])
    run(here / "mine", about, model=torch.nn.ModuleDict({"model": torch.nn.Linear(3, 1)}))
    with pytest.raises(
        ConfigError,
        match=(
            r"task._target_ is 'tests.helpers.toy.Line', which configs may not"
            r" call.*trust=\[tests.helpers.toy\]"
        ),
    ):
        exported(here / "mine")
    with pytest.raises(
        TaskError,
        match=(
            r"Line.forward fails on an example of shape \[2, 3, 8, 8\]: .*If it needs another input"
        ),
    ):
        exported(here / "mine", trust=["tests.helpers.toy"])


def test_only_task_and_data_are_built(here: Path) -> None:
    """Engine, callbacks and loggers of the run,
    and its folder on another machine, do not matter.
    """
    run(
        here / "mine",
        config(
            callbacks={"x": {"_target_": "os.system"}},
            logger={"y": {"_target_": "no.such"}},
            trainer=None,
        ),
    )
    exported(here / "mine")
    assert (here / "mine" / "export" / "tiny.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "file"), [("../../evil", "_.._evil"), ("a b/c", "a_b_c"), (None, "ImageClassifier")]
)
def test_a_name_from_a_manifest_stays_in_the_folder(
    name: str | None, file: str, here: Path
) -> None:
    """The config's name only becomes a file name."""
    about = config(conf=name)
    if name is None:
        del about["conf"]
    run(here / "mine", about)
    exported(here / "mine")
    assert [p.name for p in (here / "mine" / "export").iterdir()] == [f"{file}.safetensors"]


# -- the example --------------------------------------------------------------------------------------------------------


def test_a_module_that_only_the_checkpoint_names_needs_trust(here: Path) -> None:
    """The config of a checkpoint may name a module that the user's conf/ names,
    and another one if the user trusts it.
    """
    (here / "conf" / "mine.yaml").unlink()
    run(here / "r", users("pair"))
    with pytest.raises(
        ConfigError,
        match=r"task\._target_ is 'users_task\.Mine' in the config of a run.* trust=\[users_task\]",
    ):
        exported(here / "r")
    exported(here / "r", trust=["users_task"])


@pytest.mark.parametrize("batch", ["pair", "several", "one", "set", "list"])
def test_the_first_samples_of_the_data_are_the_example(
    batch: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches (inputs, targets), batches of one tensor, one of several loaders, a data set,
    a list of batches.
    """
    run(here / "mine", users(batch))
    exported(here / "mine")
    assert "against Mine.forward on batches of 2 and 3 samples" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ("dict", "a batch is a dict"),
        ("text", "a batch is a str"),
        ("nothing", "there is no validation"),
        ("empty", "there is no"),
    ],
)
def test_data_that_does_not_show_the_inputs_is_refused(batch: str, found: str, here: Path) -> None:
    """If the inputs cannot be derived, the message requests an example_input_array."""
    run(here / "mine", users(batch))
    with pytest.raises(
        TaskError,
        match=(
            f"The inputs of Mine.forward cannot be derived: {found}.*attribute example_input_array"
        ),
    ):
        exported(here / "mine")
