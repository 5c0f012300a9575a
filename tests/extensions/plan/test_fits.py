"""Which engine a run fits in: the arithmetic of memory,
and the command of the first setting that fits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from recipes.gpt import GPT
from tests.helpers.toy import Line, loader, quiet
from trainkit.engine.simulated import SimulatedEngine
from trainkit.extensions.context.sequence import mean_of_parts, part
from trainkit.extensions.plan.command import main
from trainkit.extensions.plan.fits import Need, Shared, choices, fit_rows, measure_need
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


def need_of(
    task: Line, tmp_path: Path, data: Any = None, engine: SimulatedEngine | None = None
) -> Need:
    """What a run needs; of two ranks without an engine."""
    trainer = quiet(tmp_path, engine=engine or SimulatedEngine("ddp", 2, 2), max_epochs=1)
    sources = DataSources({"train": loader() if data is None else data})
    with Stage("fit", task, sources, trainer.callbacks, trainer.options) as stage:
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


class Text(Line):
    """Blocks with attention over 32 tokens, which the step takes its part of."""

    def make_model(self) -> nn.Module:
        """Return the recipe's model."""
        return GPT(vocab_size=16, context=32, width=16, depth=2, heads=2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean over the tokens."""
        logits_BTV = self.model(part(batch))
        next_N = part(batch).flatten()
        return mean_of_parts(functional.cross_entropy(logits_BTV.flatten(0, 1), next_N))


def test_ranks_that_share_sequences_are_measured(tmp_path: Path) -> None:
    """Half of the tokens need half of the activations, and the keys and values of all."""
    data = DataLoader(torch.zeros(32, 32, dtype=torch.long), batch_size=4)  # type: ignore[arg-type]
    engine = SimulatedEngine("ddp", 4, 4)
    need = need_of(Text(), tmp_path, data, engine)
    two, four = need.shared
    assert (two.ranks, four.ranks) == (2, 4)
    keys = 2 * 4 * 32 * 16 * 4  # of a layer, with values: 4 samples, 32 tokens, width 16, float32
    for shared in need.shared:
        own = need.activations / shared.ranks
        assert own < shared.activations < own + 2 * 2 * keys
        assert shared.recomputed is not None and shared.recomputed < shared.activations / 2
        # of two layers, in forward and in backward
        assert shared.sent == 2 * 2 * (shared.ranks - 1) * keys / shared.ranks
    assert need_of(Deep(), tmp_path / "deep", engine=SimulatedEngine("ddp", 4, 4)).shared == ()


def test_shared_sequences_are_named_once_nothing_else_fits() -> None:
    """The first of them that fits is the last one shown, and its row says what a step has."""
    shared = tuple(Shared(count, 6000 // count, 1000 // count, 100) for count in (2, 4))
    need = Need(6000, 1000, 500, shared)
    listed, fits = fit_rows(choices(SIZES, need, 16, 16), need, 2100 / 0.9 / 1e9, "conf=gpt")
    context = {name: text for name, text in listed if "context" in name}
    assert [*context] == [
        "engine=fsdp engine.context=2",
        "engine=fsdp engine.context=2 trainer.activation_checkpointing=true",
    ]
    assert fits and [*context.values()][-1].endswith(
        "fits; a step has 1/2 of the samples, or trainer.global_batch_size"
    )
    assert "engine.context=2 trainer.activation_checkpointing=true" in dict(listed)["use"]
    listed, _ = fit_rows(choices(SIZES, need, 16, 16), need, 1, "conf=gpt")
    assert not any("context" in name for name, _ in listed)


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
