"""LambdaCallback: hooks as arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.helpers.toy import Line, loader, quiet
from trainkit.errors import ConfigError


def test_functions_are_hooks(tmp_path: Path) -> None:
    """Each function is called with the hook's arguments;
    hooks that are not given are not in the table.
    """
    seen: list[Any] = []
    callback = trainkit.LambdaCallback(
        on_train_epoch_end=lambda trainer, task: seen.append(
            (trainer.current_epoch, type(task).__name__)
        ),
        on_train_batch_start=lambda trainer, task, batch, batch_idx: seen.append(batch_idx),
    )
    trainer = quiet(tmp_path, max_epochs=2, callbacks=[callback, trainkit.LambdaCallback()])
    trainer.fit(Line(), loader(8))
    assert seen == [0, 1, (0, "Line"), 0, 1, (1, "Line")]
    assert isinstance(callback, trainkit.LambdaCallback)
    assert trainer.hooks.owners("on_train_step_end") == []
    assert trainer.hooks.owners("on_train_batch_start") == ["LambdaCallback"]


def test_a_misspelt_hook_is_named() -> None:
    """An unknown hook, or a value that is no function, is refused."""
    with pytest.raises(
        ConfigError,
        match=r"on_train_epoch_ends is not a setting\. Did you mean 'on_train_epoch_end'",
    ):
        trainkit.LambdaCallback(on_train_epoch_ends=print)
    with pytest.raises(
        ConfigError, match=r"LambdaCallback\.on_train_end is 3; it must be a function"
    ):
        trainkit.LambdaCallback(on_train_end=3)  # type: ignore[arg-type]
