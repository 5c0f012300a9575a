"""Which engine a run fits in: the arithmetic of memory,
and the command of the first setting that fits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.toy import Line, loader, quiet
from trainkit.engine.simulated import SimulatedEngine
from trainkit.extensions.plan.command import main
from trainkit.extensions.plan.fits import Need, choices, fit_rows, measure_need
from trainkit.extensions.plan.plan import Sizes
from trainkit.run.build import StartFrom, build_run
from trainkit.run.data_sources import DataSources
from trainkit.run.setup import Stage

SIZES = Sizes(weights=4000, gradients=4000, optimizer=8000, payload=4000, tensors=3)
NEED = Need(activations=6000, recomputed=1000, gathered=500)


class Block(nn.Module):
    """Two layers and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many features."""
        return x + self.down(torch.tanh(self.up(x)))


class Deep(Line):
    """Three blocks and a last layer."""

    def make_model(self) -> nn.Module:
        """Return them."""
        return nn.Sequential(Block(), Block(), Block(), nn.Linear(3, 1))


def need_of(task: Line, tmp_path: Path) -> Need:
    """What a run of two ranks needs."""
    trainer = quiet(tmp_path, engine=SimulatedEngine("ddp", 2, 2), max_epochs=1)
    with Stage(
        "fit", task, DataSources({"train": loader()}), trainer.callbacks, trainer.options
    ) as stage:
        return measure_need(build_run(stage, StartFrom()))


def test_activations_are_measured(tmp_path: Path) -> None:
    """Each block keeps its 64 features (float32) and little else;
    with activation checkpointing its input alone.
    """
    need = need_of(Deep(), tmp_path)
    assert 3 * 64 * 4 * 4 <= need.activations <= 3 * (64 + 3 * 3) * 4 * 4 + 200
    assert need.recomputed is not None and need.recomputed < need.activations / 8
    assert need.gathered == 4 * (2 * (3 * 64 + 64 + 64 * 3 + 3) + 4)


def test_a_model_without_blocks_has_nothing_to_recompute(tmp_path: Path) -> None:
    """A single layer: activation checkpointing is not offered."""
    need = need_of(Line(), tmp_path)
    assert need.recomputed is None
    assert not any("checkpointing" in choice.settings for choice in choices(SIZES, need, 8, 8))


def test_the_memory_of_each_setting() -> None:
    """By the formulas of the module: 16 ranks on 2 hosts."""
    found = {
        choice.settings: (choice.device, choice.host, choice.traffic)
        for choice in choices(SIZES, NEED, 16, 8)
    }
    assert found["engine=auto"] == (16000 + 6000, 0, 8000)
    assert found["engine=fsdp engine.reshard_after_forward=false"] == (1000 + 4000 + 6000, 0, 8000)
    assert found["engine=fsdp engine.replicas=2"] == (2000 + 500 + 6000, 0, 12000)
    assert found["engine=fsdp"] == (1000 + 500 + 6000, 0, 12000)
    assert found["engine=fsdp trainer.activation_checkpointing=true"] == (
        1000 + 500 + 1000,
        0,
        12000,
    )
    offloaded = "engine=fsdp engine.cpu_offload=true trainer.activation_checkpointing=true"
    assert found[offloaded] == (500 + 1000, 1000, 12000)


@pytest.mark.parametrize(
    ("memory_bytes", "use"),
    [
        (25000, "python -m trainkit fit conf=gpt"),
        (
            13000,
            "torchrun ... -m trainkit fit conf=gpt engine=fsdp engine.reshard_after_forward=false",
        ),
        (9000, "torchrun ... -m trainkit fit conf=gpt engine=fsdp"),
        (
            3000,
            (
                "torchrun ... -m trainkit fit conf=gpt engine=fsdp"
                " trainer.activation_checkpointing=true"
            ),
        ),
    ],
)
def test_the_first_that_fits_is_named(memory_bytes: int, use: str) -> None:
    """Those that send less come first; a tenth of the memory is left for the rest."""
    listed, fits = fit_rows(choices(SIZES, NEED, 16, 16), NEED, memory_bytes / 1e9, "conf=gpt")
    assert fits
    rows = dict(listed)
    assert rows["use"] == use


def test_nothing_fits() -> None:
    """Then the rows say what else to change."""
    listed, fits = fit_rows(choices(SIZES, NEED, 16, 16), NEED, 1e-6, "conf=gpt")
    assert not fits
    rows = dict(listed)
    assert "use" not in rows and rows["none fits"].startswith("use more ranks")


@pytest.mark.parametrize("value", ["0", "-1", "much"])
def test_a_size_that_is_none_is_an_error(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the key and the value."""
    assert main("plan", ["conf=mlp", f"memory_gb={value}"]) == 2
    assert (
        f"memory_gb is '{value}'; it must be a whole number, 1 or more." in capsys.readouterr().err
    )


def test_a_script_gets_arguments_of_its_trainer() -> None:
    """It has no overrides: the arguments of its Trainer are named."""
    choice = choices(SIZES, NEED, 16, 16)
    whole = dict(fit_rows(choice, NEED, 25e-6, "mine.py --x 1")[0])
    assert whole["use"] == "python mine.py --x 1"
    split = dict(fit_rows(choice, NEED, 9e-6, "mine.py --x 1")[0])
    assert split["use"] == "torchrun ... mine.py --x 1, and give its Trainer engine=fsdp"
