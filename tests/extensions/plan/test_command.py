"""`plan` where Horovod is not installed: nothing is trained, so nothing of it is missing."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from trainkit.extensions.plan import command as plan


@pytest.mark.parametrize(
    ("installed", "words", "launcher"),
    [
        (False, ["ranks=64"], "torchrun"),
        (True, ["ranks=64"], "horovodrun"),
        (False, ["ranks=64", "engine=horovod"], "horovodrun"),  # refused later, with what to do
        (False, ["ranks=1"], "horovodrun"),
    ],
)
def test_a_plan_needs_no_horovod(
    installed: bool,
    words: list[str],
    launcher: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without it the plan of several ranks is that of torchrun, and says so;
    what is asked for by name stays.
    """
    pretended: list[Any] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(plan, "pretend", lambda ranks, local, name: pretended.append(name))
    monkeypatch.setattr(plan, "look_at", lambda *given: given[-1]() or 0)
    assert plan.main("plan", ["conf=mlp", *words]) == 0
    assert pretended == [launcher]
    assert (
        "Horovod is not installed here: the plan is that of torchrun" in capsys.readouterr().out
    ) == (launcher == "torchrun")
