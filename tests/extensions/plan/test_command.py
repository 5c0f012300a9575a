"""`plan` as a command: nothing is trained, so that no Horovod, GPU or cluster is missing."""

from __future__ import annotations

import importlib.util
import json
import os
from typing import Any

import pytest
from torch._dynamo.utils import counters

from trainkit.extensions.plan import command as plan


@pytest.mark.parametrize(
    ("installed", "arguments", "launcher"),
    [
        (False, ["ranks=64"], "torchrun"),
        (True, ["ranks=64"], "horovodrun"),
        (False, ["ranks=64", "engine=horovod"], "horovodrun"),  # refused later, with what to do
        (False, ["ranks=1"], "horovodrun"),
    ],
)
def test_a_plan_needs_no_horovod(
    installed: bool,
    arguments: list[str],
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
    assert plan.main("plan", ["conf=mlp", *arguments]) == 0
    assert pretended == [launcher]
    assert (
        "Horovod is not installed here: the plan is that of torchrun" in capsys.readouterr().out
    ) == (launcher == "torchrun")


def facts(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return a plan as --json has it; the variables that simulate its ranks are removed again."""
    before = dict(os.environ)
    try:
        assert plan.main("plan", ["--json", *arguments]) == 0
    finally:
        os.environ.clear()
        os.environ.update(before)
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    return made


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["trainer.precision=fp8-mixed"], "ImageClassifier, fp8-mixed"),
        (["trainer.compile=true", "trainer.assert_no_sync=true"], "ImageClassifier, 32-true"),
    ],
)
def test_what_a_gpu_alone_has_is_planned_without_one(
    arguments: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes, batches and rates are the same, whatever this machine multiplies in; nothing is
    compiled. (Its seconds are those of torch.compile's import.)
    """
    before = counters["stats"]["unique_graphs"]
    made = facts(["conf=mlp", "ranks=8", "memory_gb=80", *arguments], capsys)
    assert dict(made["step"])["  training_step"] == shown
    assert made["fits"]
    assert counters["stats"]["unique_graphs"] == before


def test_a_dtype_that_rows_do_not_count_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """engine.param_dtype: activations are measured in the weights' own; what is gathered is halved."""
    arguments = ["conf=mlp", "engine=fsdp", "ranks=2", "memory_gb=1"]
    whole, half = (facts([*arguments, *more], capsys) for more in ([], ["engine.param_dtype=bf16"]))
    assert (
        "counted in the weights' own dtype" in dict(half["engines"])["without engine.param_dtype"]
    )
    sent = [
        next(own for own in made["layouts"] if own["settings"] == "engine=fsdp")["sent_bytes"]
        for made in (whole, half)
    ]
    assert sent[0]["weights and gradients"] == pytest.approx(
        sent[1]["weights and gradients"] * 3 / 2, rel=1e-3
    )


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_launcher_is_one_for_fit(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """However many ranks are simulated: this process was started by none."""
    before = dict(os.environ)
    try:
        assert plan.main("plan", ["conf=mlp", "launcher=slurm", f"ranks={ranks}"]) == 2
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert (
        "launcher is slurm, which is for fit; plan runs in this process" in capsys.readouterr().err
    )
