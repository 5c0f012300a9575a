"""save_hyperparameters: what it saves, in which __init__ it works, and what loggers receive."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.api.datamodule import DataModule
from trainkit.api.hyperparameters import HyperParameters
from trainkit.api.task import Task
from trainkit.errors import TaskError
from trainkit.loggers.base import Logger


class This(Line):
    """A Line with another name for `self`."""

    def __init__(this, width: int, *rest: int, depth: int = 2, **more: Any) -> None:  # noqa: N805
        super().__init__()
        this.save_hyperparameters()


def test_self_may_have_another_name() -> None:
    """The object is the first argument, whatever its name;
    keyword arguments are saved by their own names.
    """
    assert dict(This(8, 1, 2, depth=3, bias=True).hparams) == {"width": 8, "depth": 3, "bias": True}


class Base(Task):
    """Saves its arguments."""

    def __init__(self, lr: float = 0.1, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()


class Middle(Base):
    """Passes them on."""

    def __init__(self, *, dropout: float = 0.5, **more: Any) -> None:
        super().__init__(**more)


class Child(Middle):
    """Has an argument of its own, and another default."""

    def __init__(this, classes: int, lr: float = 0.3) -> None:  # noqa: N805
        super().__init__(lr=2 * lr, dropout=0.1)


def test_a_call_in_a_base_class_saves_the_subclasses_arguments_too() -> None:
    """All calls of __init__ in progress count, and of one name the subclass's:
    a Child can be built from its hparams.
    """
    child = Child(7)
    assert dict(child.hparams) == {"lr": 0.3, "width": 4, "dropout": 0.1, "classes": 7}
    assert dict(Base(width=2).hparams) == {"lr": 0.1, "width": 2}


def test_a_subclass_may_save_its_own() -> None:
    """A call after super().__init__() saves the subclass's arguments."""

    class Own(Line):
        def __init__(self, width: int = 3, net: Any = None) -> None:
            super().__init__(lr=0.5)
            self.save_hyperparameters(ignore="net")

    assert dict(Own(5).hparams) == {"width": 5}


def test_a_dataclass_may_save_its_fields() -> None:
    """__post_init__ runs within __init__, so the fields are its arguments."""

    @dataclasses.dataclass
    class Data(DataModule):
        batch_size: int = 4

        def __post_init__(self) -> None:
            self.save_hyperparameters()

    assert Data(8).hparams.batch_size == 8


@pytest.mark.parametrize("given", [{"a": 1}, Namespace(a=1)])
def test_a_mapping_or_a_namespace_is_saved(given: Any) -> None:
    """save_hyperparameters(config) saves its entries, as attributes too, which can be set."""
    task = Line()
    task.save_hyperparameters(given)
    assert task.hparams.a == 1
    task.hparams.b = 2
    assert dict(task.hparams) == {"a": 1, "b": 2}
    assert isinstance(task.hparams, HyperParameters)


def test_mistakes_are_explained() -> None:
    """A name that is no argument, and a call outside of __init__."""

    class Wrong(Line):
        def __init__(self, width: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters("widht")

    with pytest.raises(
        TaskError,
        match=r"'widht' is no argument of its __init__\. Did you mean 'width'\? It has width\.",
    ):
        Wrong()
    with pytest.raises(
        TaskError, match=r"^Line\.save_hyperparameters\(\) is called outside of Line\.__init__"
    ):
        Line().save_hyperparameters()


def test_loggers_receive_what_may_be_logged(tmp_path: Path) -> None:
    """logger=False keeps arguments from the loggers;
    a DataModule's are logged beside the Task's.
    """
    written: list[dict[str, Any]] = []

    class Keep(Logger):
        def open(self, run: Any) -> None: ...
        def write_metrics(self, metrics: Any, step: int, epoch: int) -> None: ...
        def finalize(self, status: str) -> None: ...
        def write_hyperparams(self, params: dict[str, Any]) -> None:
            written.append(params)

    class Own(Line):
        def __init__(self, width: int = 3, secret: str = "s", act: Any = print) -> None:
            super().__init__()
            self.save_hyperparameters("width", "act")
            self.save_hyperparameters("secret", logger=False)

    class Data(DataModule):
        def __init__(self, root: str) -> None:
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader(4)

    task = Own()
    quiet(tmp_path, logger=Keep()).fit(task, datamodule=Data("here"))
    assert written == [{"root": "here", "width": 3}]
    assert task.hparams.secret == "s"


class Plain(DataModule):
    """A DataModule that a worker process may receive."""

    def train_dataloader(self) -> Any:
        """Return 4 rows."""
        return loader(4)


def test_copies_do_not_belong_to_the_run(tmp_path: Path) -> None:
    """After a fit a DataModule goes to a worker process, and a Task is copied, without the run."""
    task, data = Line(), Plain()
    quiet(tmp_path).fit(task, datamodule=data)
    assert data.trainer is task.trainer
    with pytest.raises(TaskError, match=r"^Plain\.trainer: no Trainer runs this DataModule yet\."):
        _ = pickle.loads(pickle.dumps(data)).trainer
    with pytest.raises(TaskError, match=r"^Line\.trainer: no Trainer runs this Task yet\."):
        _ = copy.deepcopy(task).trainer
