"""The table of hooks: which hooks are overridden."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.helpers.toy import Line
from trainkit.api.callback import Callback
from trainkit.api.dispatch import Hooks
from trainkit.api.task_hooks import TASK_HOOKS
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.names.lightning import TASK_METHODS


class Watch(Callback):
    """Overrides one hook."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_start(self, trainer: Any, task: Any) -> None:
        """Record the caller."""
        self.seen.append((trainer, task))


class Later(Watch):
    """Inherits it."""


def test_only_overridden_hooks_are_called() -> None:
    """A hook that is not overridden is not in the table, and calling it does nothing."""
    hooks = Hooks("trainer", Line(), [Watch(), Callback()])  # type: ignore[arg-type]
    assert "on_train_start" in hooks._table
    assert "on_train_batch_end" not in hooks._table
    hooks("on_train_batch_end")
    hooks("no_such_hook")


def test_inherited_hooks_are_called() -> None:
    """A callback's subclass keeps the hooks of its parent."""
    watch, task = Later(), Line()
    Hooks("trainer", task, [watch])("on_train_start")  # type: ignore[arg-type]
    assert watch.seen == [("trainer", task)]


def _of_keras(self: Any, logs: Any = None) -> None: ...


def _of_transformers(self: Any, args: Any, state: Any, control: Any, **others: Any) -> None: ...


def _of_lightning_1(self: Any, outputs: Any) -> None: ...


@pytest.mark.parametrize(
    ("base", "name", "hook", "text"),
    [
        (
            Callback,
            "on_train_end",
            _of_keras,
            "on_train_end(logs=None) is called with (trainer, task)",
        ),
        (
            Callback,
            "on_train_end",
            _of_transformers,
            "(args, state, control, **others) is called with (tr",
        ),
        (
            Line,
            "on_train_epoch_end",
            _of_lightning_1,
            "on_train_epoch_end(outputs) is called with (), which",
        ),
        (
            Line,
            "setup",
            lambda self: None,
            "setup() is called with (stage), which it does not take",
        ),
    ],
)
def test_a_hook_with_others_arguments_is_refused_at_the_start(
    base: type, name: str, hook: Any, text: str
) -> None:
    """That of another trainer, by the same name; it would fail when it is called, after hours."""
    own = type("Own", (base,), {name: hook})()
    task, callbacks = (Line(), [own]) if base is Callback else (own, [])
    with pytest.raises((ConfigError, TaskError), match=re.escape(text)):
        Hooks("trainer", task, callbacks)  # type: ignore[arg-type]


def test_hooks_with_fewer_names_or_more_defaults_are_taken() -> None:
    """As Python takes them; the number of the loader may be left out, as in Lightning."""

    class Own(Callback):
        def on_train_batch_end(self, *arguments: Any, own: int = 3) -> None: ...

        def on_validation_batch_end(
            self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None: ...

    hooks = Hooks("trainer", Line(), [Own()])  # type: ignore[arg-type]
    assert hooks.has("on_train_batch_end") and hooks.has("on_validation_batch_end")


def test_a_callbacks_own_hook_is_refused_in_a_task() -> None:
    """A hook that only callbacks have would never be called on a Task."""

    class Own(Line):
        def on_metrics(self) -> None:
            """Never called."""

    with pytest.raises(
        TaskError,
        match=(
            r"Own\.on_metrics\(\) is no hook of a Task: it would never be called.*A Callback has it"
        ),
    ):
        Hooks("trainer", Own(), [])  # type: ignore[arg-type]


def test_a_method_that_the_task_calls_itself_is_no_hook() -> None:
    """Whatever its name, as pytorch-forecasting's on_epoch_end; one that only calls its base's is."""

    class Own(Line):
        def on_epoch_end(self, outputs: Any) -> None: ...

        def on_train_epoch_end(self) -> None:
            self.on_epoch_end([])

    class Derived(Own):
        def on_epoch_end(self, outputs: Any) -> None:
            super().on_epoch_end(outputs)

    class Unused(Line):
        def on_epoch_end(self) -> None:
            self.on_epoch_end()

    class Decorated(Line):
        def on_epoch_end(self) -> None: ...

        @torch.no_grad()
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return [self.on_epoch_end() for _ in batch]

    class Named(Line):  # as an argument of Task.log
        def on_step(self) -> None: ...

    Hooks("trainer", Derived(), [])  # type: ignore[arg-type]
    Hooks("trainer", Decorated(), [])  # type: ignore[arg-type]
    with pytest.raises(TaskError, match=r"Named\.on_step\(\) is no hook of a Task"):
        Hooks("trainer", Named(), [])  # type: ignore[arg-type]
    with pytest.raises(TaskError, match=r"Unused\.on_epoch_end\(\) is no hook of a Task"):
        Hooks("trainer", Unused(), [])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TASK_METHODS)
def test_what_lightning_would_call_is_refused_with_what_to_do(name: str) -> None:
    """A method that comes along from a LightningModule is not passed over in silence."""
    own = type("Own", (Line,), {name: lambda self: None})
    with pytest.raises(TaskError) as raised:
        Hooks("trainer", own(), [])  # type: ignore[arg-type]
    assert str(raised.value).startswith(
        f"Own.{name}() is a hook of Lightning, and none here: it would never be called. "
    )


def test_the_advice_names_hooks_that_there_are() -> None:
    """Each on_... in it is one of a Task's."""
    named = {word for advice in TASK_METHODS.values() for word in re.findall(r"\bon_\w+", advice)}
    assert named and named <= TASK_HOOKS
