"""What DeepSpeed cannot serve is refused with the true reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from trainkit.engine.step_settings import StepSettings
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.deepspeed.refusals import check_optimizers, check_settings
from trainkit.optim import LAMB, SOAP, Adafactor, AdEMAMix, Muon, decay_groups

GOOD = StepSettings(
    batch_size=4, accumulate=1, clip_val=1.0, clip_algorithm="norm", precision="bf16-mixed"
)


class Own(torch.optim.SGD):
    """An optimizer of the user."""


class Switched(Own):
    """One that is evaluated at other weights."""

    def train(self) -> None:
        """Switch."""

    def eval(self) -> None:
        """Switch."""


def test_what_deepspeed_serves_passes() -> None:
    """The plain settings, and an optimizer that treats each element alone."""
    check_settings(GOOD, 3)
    model = nn.Linear(2, 2)
    check_optimizers(model, [torch.optim.AdamW(model.parameters())], False, 3)
    check_optimizers(model, [Own(model.parameters())], True, 3)


@pytest.mark.parametrize(
    ("change", "stage", "words"),
    [
        (
            {"used": frozenset({"manual_optimization"})},
            1,
            "DeepSpeed makes backward, clipping and update itself",
        ),
        (
            {"used": frozenset({"batch_weight"})},
            1,
            "The Task defines batch_weight, but .*known only after the sum",
        ),
        (
            {"used": frozenset({"trainer.halve_batch_on_oom"})},
            1,
            "a rank that runs out of memory leaves the others",
        ),
        ({"used": frozenset({"trainer.compile"})}, 1, "torch.compile was not tested"),
        ({"used": frozenset({"trainer.assert_no_sync"})}, 1, "reads values from the device"),
        (
            {"callbacks": {"gradients": "GradientMonitor"}},
            1,
            "callback GradientMonitor reads gradients",
        ),
        (
            {"callbacks": {"whole_state": "Elastic"}},
            1,
            "callback Elastic needs each rank to hold the whole state",
        ),
        ({"callbacks": {"weights": "EMA"}}, 3, "callback EMA .*a lower engine.stage"),
        (
            {"clip_algorithm": "value"},
            1,
            "gradient_clip_algorithm is 'value', but DeepSpeed clips by the norm",
        ),
        (
            {"precision": "16-mixed"},
            1,
            "precision is '16-mixed'.*one of 32-true, bf16-mixed: DeepSpeed's float16 keeps",
        ),
        ({"precision": "64-true"}, 1, "precision is '64-true'.*DeepSpeed updates float32 weights"),
    ],
)
def test_a_setting_is_refused(change: dict[str, Any], stage: int, words: str) -> None:
    """The message names it, the reason, and what to use."""
    with pytest.raises(ConfigError, match=words):
        check_settings(replace(GOOD, **change), stage)


def test_an_average_of_weights_is_refused_in_stage_3_alone() -> None:
    """Below, each rank holds all weights."""
    check_settings(replace(GOOD, callbacks={"weights": "EMA"}), 2)


def test_clipping_by_value_counts_only_if_something_is_clipped() -> None:
    """The algorithm alone changes nothing."""
    check_settings(replace(GOOD, clip_val=None, clip_algorithm="value"), 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda p: [torch.optim.SGD(p[:1], lr=1), torch.optim.SGD(p[1:], lr=1)],
            "2 optimizers, and DeepSpeed takes one",
        ),
        (
            lambda p: [LAMB(p, 0.1)],
            "optimizer is LAMB, .*computes with the shape or the norm of each parameter",
        ),
        (
            lambda p: [Adafactor(p)],
            "optimizer is Adafactor, .*a flat piece of many .*Legal are SGD, .*AdEMAMix; else",
        ),
        (
            lambda p: [Muon(decay_groups(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))],
            "optimizer is Muon, .*a flat piece of many parameters",
        ),
        (lambda p: [SOAP(p)], "optimizer is SOAP, .*a flat piece of many parameters"),
        (
            lambda p: [torch.optim.Adafactor(p)],
            "optimizer is Adafactor, .*the shape or the norm of each parameter",
        ),
        (
            lambda p: [torch.optim.Adagrad(p)],
            "optimizer is Adagrad, .*which the schedules of rates do not reach",
        ),
        (lambda p: [Own(p)], "optimizer is Own, .*zero_allow_untested_optimizer to true"),
        (
            lambda p: [torch.optim.SGD([{"params": p}, {"params": []}], lr=1)],
            "a group without parameters",
        ),
    ],
)
def test_an_optimizer_is_refused(make: Any, words: str) -> None:
    """The message says what its update would become."""
    model = nn.Linear(2, 2)
    with pytest.raises(TaskError, match=words):
        check_optimizers(model, make(list(model.parameters())), False, 3)


def test_ademamix_is_refused_in_stage_3_alone() -> None:
    """There it would count a step for each part of a group."""
    model = nn.Linear(2, 2)
    check_optimizers(model, [AdEMAMix(model.parameters())], False, 2)
    with pytest.raises(TaskError, match="AdEMAMix, which counts steps by group, .*engine.stage=2"):
        check_optimizers(model, [AdEMAMix(model.parameters())], False, 3)


def test_an_optimizer_that_switches_weights_is_refused() -> None:
    """Even if the user says that it treats each element alone."""
    model = nn.Linear(2, 2)
    with pytest.raises(
        TaskError, match=r"Switched, whose train\(\) and eval\(\) change the weights"
    ):
        check_optimizers(model, [Switched(model.parameters())], True, 3)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Embedding(4, 2, sparse=True), "An embedding has sparse gradients"),
        (nn.Linear(2, 2).double(), "parameter 'weight' is float64"),
    ],
)
def test_a_model_is_refused(model: nn.Module, words: str) -> None:
    """Sparse gradients, and weights of another dtype."""
    with pytest.raises(TaskError, match=words):
        check_optimizers(model, [torch.optim.SGD(model.parameters(), lr=1)], False, 3)
