"""Steps get the arguments that they take, also where an engine has wrapped them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from trainkit.api.step_call import call_step


class Short:
    """Steps that leave arguments out."""

    def training_step(self, batch: str) -> str:
        """Return the batch."""
        return batch

    def validation_step(self, batch: str, batch_idx: int = 7) -> tuple[str, int]:
        """Return both."""
        return batch, batch_idx

    def test_step(self, *arguments: Any) -> tuple[Any, ...]:
        """Return all."""
        return arguments


def wrapped_as_torch_does(method: Callable[..., Any], owner: object) -> Callable[..., Any]:
    """Return what FSDP makes of a bound method, and trainkit of that:
    two wrappers, the first one bound again.
    """

    @functools.wraps(method)
    def inner(self: object, *arguments: Any) -> Any:
        return method(*arguments)

    bound = inner.__get__(owner, type(owner))

    @functools.wraps(bound)
    def outer(*arguments: Any) -> Any:
        return bound(*arguments)

    return outer


@pytest.mark.parametrize("engine", ["none", "fsdp", "deepspeed"])
def test_a_step_gets_what_its_class_takes(engine: str) -> None:
    """The signature of a wrapper may be wrong, or take anything."""
    task = Short()
    for name in ("training_step", "validation_step", "test_step") if engine != "none" else ():
        method = getattr(task, name)
        passing = functools.partial(lambda method, *arguments: method(*arguments), method)
        setattr(
            task,
            name,
            (
                wrapped_as_torch_does(method, task)
                if engine == "fsdp"
                else lambda *a, f=passing: f(*a)
            ),
        )
    assert call_step(task, "training_step", "batch", 3) == "batch"
    assert call_step(task, "validation_step", "batch", 3) == ("batch", 3)
    assert call_step(task, "validation_step", "batch", 3, 0) == ("batch", 3)
    assert call_step(task, "test_step", "batch", 3, 0) == ("batch", 3, 0)


def test_a_step_that_was_set_on_the_task_is_asked_itself() -> None:
    """As `self.training_step = self.step_a` does."""
    task = Short()
    task.training_step = task.validation_step  # type: ignore[assignment, method-assign]
    assert call_step(task, "training_step", "batch", 3) == ("batch", 3)
    task.training_step = lambda batch: batch * 2  # type: ignore[method-assign]
    assert call_step(task, "training_step", "batch", 3) == "batchbatch"
