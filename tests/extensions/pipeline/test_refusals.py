"""What does not go with stages of layers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trainkit.callbacks import GradientMonitor
from trainkit.engine.step_settings import StepSettings
from trainkit.errors import ConfigError
from trainkit.extensions.fsdp.engine import FSDPEngine
from trainkit.extensions.fsdp.layouts import check_groups
from trainkit.loggers import TensorBoardLogger


def settings(*callbacks: Any) -> StepSettings:
    """Those of a fit with these callbacks."""
    needs = {need: type(own).__name__ for own in callbacks for need in own.needs_of_engine}
    return StepSettings(4, 1, None, "norm", "32-true", callbacks=needs)


@pytest.mark.parametrize(
    "callback",
    [GradientMonitor(), TensorBoardLogger(histograms_every_n_steps=1)],
    ids=["gradients", "histograms"],
)
def test_callbacks_that_read_all_layers_are_refused(callback: Any) -> None:
    """By the name of the class; without stages, and of callbacks that do not, nothing is said."""
    text = f"engine.pipeline is 2, and {type(callback).__name__} reads all layers"
    with pytest.raises(ConfigError, match=text):
        FSDPEngine(pipeline=2).agree(settings(callback))
    FSDPEngine(tensor=2).agree(settings(callback))
    FSDPEngine(pipeline=2).agree(settings(TensorBoardLogger()))


def test_a_schedule_needs_stages() -> None:
    """One that is set without them has no effect, and is refused."""
    with pytest.raises(
        ConfigError, match=r"pipeline_schedule is 'gpipe', and engine.pipeline is 1"
    ):
        FSDPEngine(pipeline_schedule="gpipe")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pipeline_chunks": 2}, "engine.pipeline_chunks is '2', and engine.pipeline is 1"),
        ({"pipeline": 2, "pipeline_chunks": 2}, "is '1f1b', which has one stage on each rank"),
        (
            {"pipeline": 2, "pipeline_schedule": "interleaved_1f1b", "pipeline_chunks": 1},
            "takes several stages of each rank in turn. Set engine.pipeline_chunks=2",
        ),
    ],
    ids=["no stages", "1f1b", "one chunk"],
)
def test_chunks_need_a_schedule_that_takes_turns(options: Any, text: str) -> None:
    """And that schedule needs chunks."""
    with pytest.raises(ConfigError, match=re.escape(text)):
        FSDPEngine(**options)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("zigzag", "is 'zigzag'; it must be one of 1f1b, gpipe, interleaved_1f1b"),
        ("zero_bubble", "zero_bubble is not there: .* Set engine.pipeline_schedule=interleaved"),
    ],
)
def test_other_schedules_are_refused(name: str, text: str) -> None:
    """With those that there are; the one that torch cannot serve with the reason."""
    with pytest.raises(ConfigError, match=text):
        FSDPEngine(pipeline=2, pipeline_schedule=name)


def test_groups_that_do_not_come_out_even_are_refused() -> None:
    """With each setting, and their product."""
    text = "engine.tensor is 2 and engine.pipeline is 2, and there are 6 ranks; their product, 4,"
    with pytest.raises(ConfigError, match=re.escape(text)):
        check_groups(6, 1, 2, 2)
