"""Names of transformers' Trainer, Keras, Horovod and Accelerate: what an error says to use is there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import trainkit
from tests.helpers.toy import Line, loader, quiet
from trainkit import callbacks
from trainkit.callbacks import EarlyStopping, ModelCheckpoint, TuneReport
from trainkit.data import RayData
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.names import EXTENSION, lightning, others
from trainkit.trainer import Trainer

PREFIX = "In its place: "
TABLES = {
    "trainkit": others.PACKAGE,
    "trainkit.callbacks": others.CALLBACKS,
    "Trainer": others.TRAINER,
    "trainer": others.SETTINGS,
    "Trainer.fit": others.FIT,
    "EarlyStopping": others.EARLY_STOPPING,
    "ModelCheckpoint": others.MODEL_CHECKPOINT,
    "Callback": others.HOOKS,
}
ELSEWHERE = ("ckpt_path", "export", "trainer", "data", "optimizer", "engine", "lr", "run_dir")
ELSEWHERE += ("logger=", "callbacks=", "seed", "world_size", "DataLoader", "find_lr")


def is_here(place: str, text: str) -> bool:
    """Return whether the name that a text begins with is in trainkit, for a user of that place."""
    called = re.match(r"(\w+(?:\.\w+)?)(?:\((\w+)=)?", text)
    assert called is not None, text
    name, argument = called.groups()
    if text.startswith(ELSEWHERE) or (place == "trainkit.callbacks" and hasattr(callbacks, name)):
        return True
    home, _, attribute = name.rpartition(".")
    owner = {"Trainer": Trainer, "Task": trainkit.Task, "Callback": trainkit.Callback, "": trainkit}
    if home in owner and hasattr(owner[home], attribute):
        own = getattr(owner[home], attribute)
        return argument is None or argument in inspect.signature(own).parameters
    if place == "Callback":
        return hasattr(trainkit.Callback, name)
    classes = {"EarlyStopping": EarlyStopping, "ModelCheckpoint": ModelCheckpoint}
    taker = classes.get(place, Trainer.fit)
    return name in inspect.signature(taker).parameters


@pytest.mark.parametrize("place", TABLES)
def test_what_it_says_to_use_is_there(place: str) -> None:
    """Each text that names a replacement; the tables are those of the extension's doors."""
    texts = {name: text.removeprefix(PREFIX) for name, text in TABLES[place].items()}
    own = {name for name in texts if TABLES[place][name].startswith(PREFIX)}
    assert len(own) >= 3
    known = {**lightning.TRAINER, **lightning.PACKAGE}  # tests/same_names compares those
    assert [name for name in own - known.keys() if not is_here(place, texts[name])] == []
    assert place in EXTENSION.advice


def test_a_replacement_that_is_not_there_is_noticed() -> None:
    """The test above can fail."""
    for place, text in (("trainkit", "Trainr.fit. It"), ("ModelCheckpoint", "save_top. Only")):
        assert not is_here(place, text)
    assert not is_here("trainkit", "Trainer(no_such=...). It")


def test_they_are_said_where_a_user_writes_them(tmp_path: Path) -> None:
    """Where a name is imported, called, and passed to a Trainer, to fit or to a callback."""
    with pytest.raises(ImportError, match=r"^trainkit has no DistributedOptimizer\. In its place:"):
        from trainkit import DistributedOptimizer  # noqa: F401
    with pytest.raises(
        AttributeError, match=r"EarlyStoppingCallback\. In its place: EarlyStopping"
    ):
        trainkit.callbacks.EarlyStoppingCallback  # noqa: B018
    with pytest.raises(ImportError, match=r"^trainkit has no Compression\. In its place: engine\."):
        from trainkit import Compression  # noqa: F401
    with pytest.raises(AttributeError, match=r"CommitStateCallback\. In its place: Elastic\."):
        trainkit.callbacks.CommitStateCallback  # noqa: B018
    with pytest.raises(ImportError, match=r"no CommitStateCallback\. In its place: Elastic\."):
        from trainkit.callbacks import CommitStateCallback  # noqa: F401
    assert not hasattr(trainkit, "size") and getattr(trainkit, "size", 3) == 3
    assert not hasattr(trainkit.callbacks, "CommitStateCallback")
    with pytest.raises(AttributeError, match=r"no attribute 'train'\. In its place: Trainer\.fit"):
        Trainer().train()
    with pytest.raises(ConfigError, match=r"^trainer\.model: In its place: Task\."):
        Trainer(model=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^trainer\.warmup_ratio: In its place: trainer\.lr_w"):
        Trainer(warmup_ratio=0.1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^Trainer\.fit: epochs: In its place: Trainer\(max_ep"):
        Trainer().fit(None, epochs=3)  # type: ignore[arg-type, call-arg]
    with pytest.raises(ConfigError, match="^EarlyStopping.restore_best_weights: In its place: Tr"):
        EarlyStopping("val/loss", restore_best_weights=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="^ModelCheckpoint.save_best_only: In its place: monitor"):
        ModelCheckpoint(save_best_only=True)  # type: ignore[call-arg]
    hook = type("Own", (trainkit.Callback,), {"on_epoch_end": lambda self, *_: None})()
    with pytest.raises(ConfigError, match=r"never be called\. In its place: on_train_epoch_end\.$"):
        quiet(tmp_path, callbacks=[hook]).fit(Line(), loader())
    stray = type("Stray", (Line,), {"on_train_begin": lambda self: None})()
    with pytest.raises(TaskError, match=r"never be called\. In its place: on_train_start\.$"):
        quiet(tmp_path).fit(stray, loader())


def of(package: str, name: str, base: type, **members: object) -> type:
    """Return a class as another library's."""
    return type(name, (base,), {"__module__": f"{package}.inner", **members})


@pytest.mark.parametrize("package", others.OPTIMIZERS)
def test_another_librarys_optimizer_is_refused(package: str, tmp_path: Path) -> None:
    """It would count microbatches and sum gradients a second time, in a Task and in a Loop."""
    optimizer = of(package, "Wrapped", torch.optim.SGD)

    class Wrapping(Line):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters(), lr=0.1)

    text = "^The optimizer is .* without it. Give the optimizer that .*accumulate_grad_batches.$"
    with pytest.raises(TaskError, match=text):
        quiet(tmp_path).fit(Wrapping(), loader())
    model = torch.nn.Linear(2, 1)
    with pytest.raises(TaskError, match=text):
        trainkit.Loop(model, optimizer(model.parameters(), lr=0.1), loader())


@pytest.mark.parametrize("kind", others.DATA)
def test_another_librarys_data_are_refused(kind: str, tmp_path: Path) -> None:
    """Parts of ranks, which were taken for a stream that all read: a half was left out on two."""
    package, _, name = kind.partition(" ")
    base = DataLoader if name == "DataLoader" else type(name, (), {})
    shard = of(package, "Shard", base)
    data = shard(loader().dataset) if name == "DataLoader" else shard()
    text = f"^train_dataloaders: Shard is {package}'s, which .* Give (the DataLoader|trainkit)"
    with pytest.raises(ConfigError, match=text.replace("ray", "Ray")):
        quiet(tmp_path).fit(Line(), data)


def test_an_iterable_of_another_librarys_is_a_stream(tmp_path: Path) -> None:
    """As ray.data's iter_torch_batches: if ranks read other batches, that is refused elsewhere."""
    stream = of("ray", "Iterable", list)(loader())
    trainer = quiet(tmp_path, max_steps=1)
    trainer.fit(Line(), stream)
    assert trainer.global_step == 1


def test_settings_of_rays_callbacks_and_batches_are_named() -> None:
    """Of its reporting callbacks and of iter_torch_batches: what to use here."""
    with pytest.raises(
        AttributeError, match=r"no RayTrainReportCallback\. In its place: RayReport\."
    ):
        trainkit.callbacks.RayTrainReportCallback  # noqa: B018
    with pytest.raises(ImportError, match=r"prepare_model\. In its place: Trainer\.fit\."):
        from trainkit import prepare_model  # noqa: F401
    with pytest.raises(ConfigError, match=r"^RayData\.drop_last: Leave it out: a short last step"):
        RayData(list, 4, drop_last=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^TuneReport\.metrics: Leave it out: all logged values"):
        TuneReport(metrics={"loss": "val/loss"})  # type: ignore[call-arg]


def test_accelerates_own_loader_is_refused(tmp_path: Path) -> None:
    """The class that it has in the installed version."""
    accelerate = pytest.importorskip("accelerate")
    prepared = accelerate.Accelerator(cpu=True).prepare(loader())
    accelerate.state.AcceleratorState._reset_state(True)  # other tests have ranks of their own
    with pytest.raises(ConfigError, match="is accelerate's, which has each rank's own part"):
        quiet(tmp_path).fit(Line(), prepared)


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_method_of_an_optimizer_says_what_to_call(by_hand: bool, tmp_path: Path) -> None:
    """Lightning's optimizers toggle a model; here the Task does. Another name stays torch's error."""

    class Toggling(Line):
        automatic_optimization = not by_hand
        method = "toggle_model"

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return getattr(self.optimizers(), self.method)()

    with pytest.raises(AttributeError, match=r"'SGD' .*'toggle_model'\. .*toggled_optimizer"):
        quiet(tmp_path / "a", max_epochs=1).fit(Toggling(), loader(8))
    Toggling.method = "togle"
    with pytest.raises(AttributeError, match=r"'SGD' object has no attribute 'togle'$"):
        quiet(tmp_path / "b", max_epochs=1).fit(Toggling(), loader(8))
