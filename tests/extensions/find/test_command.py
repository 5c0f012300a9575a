"""find: what its lines name."""

from __future__ import annotations

from typing import Any

import pytest

from trainkit.extensions.find import command as find
from trainkit.extensions.script.subject import _rate_key


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"optimizer": {"_target_": "torch.optim.SGD"}, "task": {}}, "optimizer.lr"),
        ({"task": {"_target_": "trainkit.Task", "lr": 0.1}}, "task.lr"),
        ({"task": {"_target_": "trainkit.Task", "learning_rate": 1}}, "task.learning_rate"),
        ({"task": {"_target_": "trainkit.Task", "lr": {"_target_": "x.y"}}}, None),
        ({"task": {"_target_": "trainkit.Task"}}, None),
    ],
)
def test_a_suggested_rate_is_typed_by_the_configs_own_key(
    config: dict[str, Any], key: str | None
) -> None:
    """The optimizer's, or the task's; None if only configure_optimizers knows it."""
    assert _rate_key(config) == key


def test_an_early_stop_that_never_continues_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """By the name and the values that are typed."""
    assert find.main("find", ["lr", "conf=mlp", "early_stop=0.5"]) == 2
    assert "early_stop is '0.5'; it must be above 1" in capsys.readouterr().err
