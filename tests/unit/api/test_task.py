"""Task: methods to override and to call, and errors."""

from __future__ import annotations

import copy
import inspect
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.toy import Line, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.api.task import Task
from trainkit.errors import CheckpointError, ConfigError, TaskError
from trainkit.run.evaluator import uncounted


class Configured(Line):
    """Has arguments."""

    def __init__(self, width: int, depth: int = 2, *, name: str = "a") -> None:
        super().__init__()
        self.save_hyperparameters(ignore=("name",))


def test_hyperparameters_are_kept() -> None:
    """save_hyperparameters saves the constructor's arguments, given or not,
    except those to ignore.
    """
    task = Configured(3)
    assert task.hparams == {"width": 3, "depth": 2}
    assert task.hparams.width == 3
    with pytest.raises(
        AttributeError, match=r"No hyper-parameter 'name'; there are width, depth\."
    ):
        _ = task.hparams.name


def test_some_hyperparameters_are_kept() -> None:
    """save_hyperparameters saves the named arguments."""

    class Some(Line):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.save_hyperparameters("depth")

    assert Some(1, 2).hparams == {"depth": 2}


def test_a_task_can_be_copied() -> None:
    """A Task is a module like any other: it can be copied."""
    task = Configured(3)
    other = copy.deepcopy(task)
    assert other.hparams == task.hparams
    assert torch.equal(other.model.weight, task.model.weight)


def test_a_task_without_trainer_says_so() -> None:
    """Before a Trainer runs it, a Task has none."""
    with pytest.raises(TaskError, match=r"Line\.trainer: no Trainer runs this Task yet"):
        _ = Line().global_step


def test_a_task_knows_where_it_is(tmp_path: Path) -> None:
    """Step, epoch, device and trainer are there while it runs."""
    seen: list[Any] = []

    class Look(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(
                (self.global_step, self.current_epoch, self.device, self.trainer.world_size)
            )
            return super().training_step(batch, batch_idx)

    quiet(tmp_path, max_epochs=2).fit(Look(), loader(8))
    cpu = torch.device("cpu")
    assert seen == [(0, 0, cpu, 1), (1, 0, cpu, 1), (2, 1, cpu, 1), (3, 1, cpu, 1)]


def test_log_without_a_trainer_is_refused() -> None:
    """A Task that nothing runs has no place for a value."""
    with pytest.raises(TaskError, match=r"Line\.trainer: no Trainer runs this Task yet"):
        Line().log("loss", 1.0)


def test_log_dict_logs_each(tmp_path: Path) -> None:
    """log_dict logs each value with the same options; a weight of its own counts."""

    class Many(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log_dict({"a": float(batch_idx), "b": torch.tensor(2.0)}, batch_size=1)
            self.log("sum", 1.0, reduce_fx="sum")

    assert quiet(tmp_path).validate(Many(), loader(5)) == {"a": 0.5, "b": 2.0, "sum": 2.0}


def test_an_evaluation_logs_no_steps(tmp_path: Path) -> None:
    """In an evaluation a value of the step only is refused;
    one of step and epoch is the epoch's.
    """

    class Steps(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("both", float(batch_idx), on_step=True, on_epoch=True)
            if batch_idx == 1:
                self.log("alone", 1.0, on_step=True, on_epoch=False)

    assert quiet(tmp_path, limit_val_batches=1).validate(Steps(), loader(8)) == {"both_epoch": 0.0}
    with pytest.raises(TaskError, match="an evaluation logs no steps"):
        quiet(tmp_path).validate(Steps(), loader(8))


@pytest.mark.parametrize("flags", [{"on_step": False}, {"on_step": False, "on_epoch": False}])
def test_a_value_that_is_logged_nowhere_is_refused(tmp_path: Path, flags: dict[str, Any]) -> None:
    """In training, where epochs are logged on request, on_step=False alone logs nothing."""

    class Unseen(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("unseen", 1.0, **flags)
            return super().training_step(batch, batch_idx)

    with pytest.raises(TaskError, match=r"log\('unseen', \.\.\.\) would log neither"):
        quiet(tmp_path).fit(Unseen(), loader(8))


def test_a_rank_without_samples_logs_by_the_flags_of_an_evaluation() -> None:
    """What is legal in an evaluation is so on a rank whose samples are borrowed."""
    task = Line()
    with uncounted(task, evaluates=True):
        task.log("val/x", 1.0, on_step=False)
    with uncounted(task):
        task.log("train/x", 1.0, on_epoch=False)


def test_one_loader_does_not_replace_the_values_of_another(tmp_path: Path) -> None:
    """add_dataloader_idx=False with one name on two loaders is refused."""

    class Same(Line):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val/x", float(dataloader_idx), add_dataloader_idx=False)

    assert quiet(tmp_path).validate(Same(), loader(4)) == {"val/x": 0.0}
    with pytest.raises(TaskError, match=r"log\('val/x', \.\.\.\) of one loader is the name"):
        quiet(tmp_path).validate(Same(), [loader(4), loader(4)])


def test_the_flags_of_log_stand_where_lightning_has_them() -> None:
    """A call with flags by their places means the same; the rest is by name."""
    names = [*inspect.signature(Task.log).parameters][1:8]
    assert names == ["name", "value", "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"]
    with pytest.raises(TypeError, match="positional"):
        Line().log("x", 1.0, True, True, True, True, "mean", 3)  # type: ignore[misc]


def test_print_is_for_the_first_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """print of a Task prints, on rank 0."""

    class Prints(Line):
        def on_fit_start(self) -> None:
            self.print("hello", "you", sep="-")

    quiet(tmp_path).fit(Prints(), loader(8))
    assert capsys.readouterr().out == "hello-you\n"


def test_data_may_come_from_the_task(tmp_path: Path) -> None:
    """A Task may have its own data; data given to the Trainer take precedence."""

    class Own(Line):
        def train_dataloader(self) -> Any:
            return loader(8)

        def val_dataloader(self) -> Any:
            return loader(4)

        def predict_dataloader(self) -> Any:
            return loader(3)

        test_dataloader = val_dataloader

    trainer = quiet(tmp_path)
    trainer.fit(Own())
    assert trainer.global_step == 2
    trainer.fit(Own(), loader(12))
    assert trainer.global_step == 3
    assert set(trainer.validate(Own())) == set(trainer.test(Own())) == {"val/loss"}
    assert len(trainer.predict(Own())[0]) == 3


class NoLoss(Task):
    """Has no training_step."""

    def configure_optimizers(self) -> Any:
        """Never called."""


class Misspelt(NoLoss):
    """Has one with another name."""

    def trainingStep(self, batch: Any, batch_idx: int) -> Any:
        """Never called."""


class NoInit(Line):
    """Does not call super().__init__()."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (NoLoss(), r"NoLoss has no training_step\(\)\. Define it and return the loss\."),
        (
            Misspelt(),
            (
                r"has no training_step\(\)\. .* \(it has trainingStep\(\), which is spelt"
                r" differently\)"
            ),
        ),
        (torch.nn.Linear(1, 1), r"The task is a Linear; it must be a trainkit\.Task"),
        (Line, r"The task is the class Line; give an object of it: Line\(\.\.\.\)"),
        (NoInit(), r"NoInit\.__init__ does not call super\(\).__init__\(\)"),
    ],
)
def test_what_is_no_task_is_refused(tmp_path: Path, task: Any, words: str) -> None:
    """A Task that cannot be trained is refused before anything starts."""
    with pytest.raises(TaskError, match=words):
        quiet(tmp_path / "run").fit(task, loader(8))
    assert not (tmp_path / "run").exists()


def test_validation_needs_a_step(tmp_path: Path) -> None:
    """validate asks for a validation_step."""

    class Blind(Task):
        """Sees nothing."""

    with pytest.raises(
        TaskError, match=r"Blind has no validation_step\(\)\. Define it and log values"
    ):
        quiet(tmp_path).validate(Blind(), loader(8))


class Misspelt(Line):
    """Has a hook with a letter too many."""

    def on_validation_ends(self) -> None:
        """Never called."""


def test_a_hook_that_would_never_be_called_is_refused(tmp_path: Path) -> None:
    """A method that looks like a hook and is none does not pass in silence."""
    words = (
        r"Misspelt\.on_validation_ends\(\) is no hook of a Task.* Did you mean"
        r" 'on_validation_\w+'\?"
    )
    with pytest.raises(TaskError, match=words):
        quiet(tmp_path).fit(Misspelt(), loader(8))

    class Wrong(Callback):
        def on_epoch_ended(self, trainer: Any, task: Any) -> None:
            """Never called."""

    with pytest.raises(ConfigError, match=r"Wrong\.on_epoch_ended\(\) is no hook of a Callback"):
        quiet(tmp_path, callbacks=Wrong()).fit(Line(), loader(8))


class Wide(Task):
    """Saves its arguments; one of them is no plain value."""

    def __init__(self, width: int, rate: float = 0.1, act: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Linear(3, width)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.hparams.rate)


def test_a_task_is_built_from_its_checkpoint(tmp_path: Path) -> None:
    """Its class gets the saved arguments, and those given in their place;
    its weights are the checkpoint's.
    """
    task, trainer = Wide(5, rate=0.2, act=nn.ReLU()), quiet(tmp_path, enable_checkpointing=True)
    trainer.fit(task, loader(8))
    found = Wide.load_from_checkpoint(tmp_path / "checkpoints" / "last")
    assert (found.hparams.width, found.hparams.rate, found.hparams.act) == (5, 0.2, None)
    assert torch.equal(weights(found), weights(task))
    assert (
        Wide.load_from_checkpoint(str(tmp_path / "checkpoints" / "last"), rate=0.3).hparams.rate
        == 0.3
    )


class Whole(Line):
    """Saves the entries of its arguments."""

    def __init__(self, act: Any, model: Any = None, **more: Any) -> None:
        super().__init__()
        self.given = (act, model)
        self.save_hyperparameters(act)
        self.save_hyperparameters(model, ignore="rate")
        self.hparams.later = 3


def trained(task: Task, folder: Path) -> Path:
    """Train it, and return its checkpoint."""
    quiet(folder, enable_checkpointing=True).fit(task, loader(8))
    return folder / "checkpoints" / "last"


def test_arguments_come_back_whole(tmp_path: Path) -> None:
    """Those whose entries were saved: namespaces and mappings, by their attributes on any level."""
    act = Namespace(width=5, sizes=(1, {"deep": 2}), inner={"deep": {"more": 1}})
    folder = trained(Whole(act, {"rate": 0.1, "depth": 2}), tmp_path)
    act, model = Whole.load_from_checkpoint(folder).given
    assert (act.width, act.inner.deep.more, act.sizes) == (5, 1, (1, {"deep": 2}))
    assert (model["depth"], model.later, "rate" in model) == (2, 3, False)
    act, model = Whole.load_from_checkpoint(folder, act={"a": 1}, width=6).given
    assert (act["a"], model.width) == (1, 6)


@pytest.mark.parametrize("value", [nn.ReLU(), "${oc.env:HOME}"])
def test_arguments_that_are_not_whole_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any
) -> None:
    """One that must be given is an error, and another is named."""
    folder = trained(Whole({"width": value}, {}), tmp_path / "needed")
    with pytest.raises(CheckpointError, match="does not hold the arguments act of Whole"):
        Whole.load_from_checkpoint(folder)
    if not isinstance(value, str):
        folder = trained(Whole({"a": 1}, {"width": value}), tmp_path / "other")
        capsys.readouterr()
        with pytest.raises(TaskError, match="None cannot be saved"):  # by its own __init__
            Whole.load_from_checkpoint(folder)
        said = " ".join(capsys.readouterr().out.split())
        assert "made with other values of model, width than the defaults of Whole" in said


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"widht": 1}, "load_from_checkpoint: widht is not a setting. Did you mean 'width'?"),
        ({"hparams_file": "a.yaml"}, "load_from_checkpoint: hparams_file: A checkpoint holds"),
        ({"weights_only": True}, "load_from_checkpoint: weights_only: Leave it out"),
        (
            {"map_location": {"cuda:1": "cpu"}},
            "map_location is {'cuda:1': 'cpu'}; it must be a device",
        ),
    ],
)
def test_what_load_from_checkpoint_lacks_is_refused(tmp_path: Path, given: Any, words: str) -> None:
    """Also of a class with **kwargs, which took the names of Lightning's for its own."""
    folder = trained(Wide(5), tmp_path)
    for kind in (Wide, Whole):
        if kind is Wide or "widht" not in given:
            with pytest.raises(TaskError) as raised:
                kind.load_from_checkpoint(folder, **given)
            assert str(raised.value).startswith(words)


def test_a_task_is_built_on_a_device(tmp_path: Path) -> None:
    """map_location is the Task's device, by its place or its name."""
    folder = trained(Wide(5), tmp_path)
    assert Wide.load_from_checkpoint(folder, "meta").device.type == "meta"
    assert Wide.load_from_checkpoint(folder, map_location=torch.device("cpu")).device.type == "cpu"


@pytest.mark.parametrize(
    "value", [(3, 4), [(1, "a"), (2.5, None)], {"sizes": (1,)}, {0: "a", 2: [3]}]
)
def test_arguments_come_back_as_they_were(tmp_path: Path, value: Any) -> None:
    """Tuples are tuples, and numbers stay keys, on any level."""
    quiet(tmp_path, enable_checkpointing=True).fit(Wide(5, act=value), loader(8))
    assert repr(Wide.load_from_checkpoint(tmp_path / "checkpoints" / "last").hparams.act) == repr(
        value
    )


@pytest.mark.parametrize(
    "value", [nn.ReLU(), {1}, (nn.ReLU(),), (float("nan"), Path("a")), {(1, 2): 3}]
)
def test_a_value_that_is_not_saved_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any
) -> None:
    """A line says that the default is used in its place; not if it is given, or was the default."""
    quiet(tmp_path, enable_checkpointing=True).fit(Wide(5, act=value), loader(8))
    capsys.readouterr()
    folder = tmp_path / "checkpoints" / "last"
    assert Wide.load_from_checkpoint(folder).hparams.act is None
    assert "made with other values of act than the defaults of Wide" in " ".join(
        capsys.readouterr().out.split()
    )
    Wide.load_from_checkpoint(folder, act=value)
    assert capsys.readouterr().out == ""


def test_a_default_that_is_no_plain_value_needs_no_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base's default counts too, behind **kwargs."""

    class Act(Wide):
        def __init__(self, width: int, act: Any = nn.ReLU, **others: Any) -> None:
            super().__init__(width, act=act, **others)

    class Open(Act):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)

    quiet(tmp_path, enable_checkpointing=True).fit(Open(width=5), loader(8))
    capsys.readouterr()
    assert Open.load_from_checkpoint(tmp_path / "checkpoints" / "last").hparams.act is nn.ReLU
    assert capsys.readouterr().out == ""


def test_secrets_inside_tuples_are_masked(tmp_path: Path) -> None:
    """The manifest has none of them."""
    value = ({"api_key": "hush-hush-hush"}, 1)
    quiet(tmp_path, enable_checkpointing=True).fit(Wide(5, act=value), loader(8))
    folder = tmp_path / "checkpoints" / "last"
    assert "hush-hush" not in (folder / "manifest.json").read_text()
    assert isinstance(Wide.load_from_checkpoint(folder).hparams.act, tuple)


def test_arguments_that_are_not_saved_are_named(tmp_path: Path) -> None:
    """The error says how to save them, and how to give them."""

    class Unsaved(Wide):
        def save_hyperparameters(self, *names: str, **options: Any) -> None:
            self.hparams["rate"] = 0.1

    quiet(tmp_path, enable_checkpointing=True).fit(Unsaved(5), loader(8))
    with pytest.raises(
        CheckpointError,
        match=r"the arguments width of Unsaved.*load_from_checkpoint\(path, width=\.\.\.\)",
    ):
        Unsaved.load_from_checkpoint(tmp_path / "checkpoints" / "last")
    with pytest.raises(CheckpointError, match="is not there"):
        Wide.load_from_checkpoint(tmp_path / "nowhere", width=5)
