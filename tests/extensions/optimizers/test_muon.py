"""Muon: which parameters it takes, and that its steps are those of torch's Muon and AdamW."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.gpt import GPT
from tests.helpers.toy import Line, loader, quiet, weights
from trainkit.device.sync_guard import SyncGuard
from trainkit.errors import ConfigError
from trainkit.extensions.optimizers.muon import matrices_of
from trainkit.optim import Muon, decay_groups


def small_gpt() -> GPT:
    """Return a GPT of one block."""
    return GPT(context=8, width=8, depth=1, heads=2)


def layers() -> nn.Sequential:
    """Return an embedding, two matrices, a norm and a head."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(10, 8),
        nn.Linear(8, 16),
        nn.LayerNorm(16),
        nn.Linear(16, 8),
        nn.Linear(8, 10),
    )


def names(model: nn.Module, adamw: list[str] | None = None) -> list[str]:
    """Return the names of the parameters that Muon takes."""
    matrices = matrices_of(model, adamw)
    return [name for name, parameter in model.named_parameters() if parameter in matrices]


def gradients(model: nn.Module) -> None:
    """Put gradients, always the same ones, on all parameters."""
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = drawn if parameter.grad is None else parameter.grad * 0.7 + drawn


def test_matrices_of_blocks_are_muons() -> None:
    """Of a GPT, whose head shares the embedding's table, these are the layers of its blocks."""
    linear = ["attention.qkv", "attention.out", "wide.0", "wide.2"]
    assert names(small_gpt()) == [f"blocks.0.{layer}.weight" for layer in linear]


def test_embedding_head_and_convolution_are_adamws() -> None:
    """So are learned positions, norms and biases; the head is the last nn.Linear."""
    assert names(layers()) == ["1.weight", "3.weight"]
    images = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 2))
    assert names(images) == ["2.weight"]
    tokens = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    tokens.register_parameter("pos_embed", nn.Parameter(torch.zeros(3, 4)))
    assert names(tokens) == ["0.weight"]


def test_patterns_replace_the_rule() -> None:
    """What matches a name or a pattern is AdamW's, and no other matrix."""
    assert names(layers(), ["0.weight", "3.*"]) == ["1.weight", "4.weight"]
    assert names(layers(), []) == ["0.weight", "1.weight", "3.weight", "4.weight"]


def test_groups_keep_their_decay() -> None:
    """Each group of decay_groups is split by method; what does not decay still does not."""
    optimizer = Muon(decay_groups(layers(), no_weight_decay=["norm", "bias", "embedding"]))
    groups = [(g["method"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups]
    assert groups == [("muon", 0.1, 2), ("adamw", 0.1, 1), ("adamw", 0.0, 6)]


@pytest.mark.parametrize("ratio", ["match_rms_adamw", "original"])
def test_steps_are_those_of_torchs_two(ratio: Any) -> None:
    """Bit for bit, with each one's rate."""
    model = layers()
    other = copy.deepcopy(model)
    ours = Muon(decay_groups(model), 0.02, adjust_lr_fn=ratio, adamw_lr=0.003)
    matrices = [other[1].weight, other[3].weight]
    plain = [p for p in other.parameters() if p.dim() == 1]
    tables = [other[0].weight, other[4].weight]
    theirs: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, 0.02, 0.1, adjust_lr_fn=ratio),
        torch.optim.AdamW(
            [{"params": tables}, {"params": plain, "weight_decay": 0.0}],
            0.003,
            (0.9, 0.95),
            weight_decay=0.1,
        ),
    ]
    for _ in range(3):
        for one in (model, other):
            gradients(one)
        for optimizer in (ours, *theirs):
            optimizer.step()
    assert torch.equal(weights(model), weights(other))


def orthogonal(update: Tensor) -> Tensor:
    """Newton-Schulz steps in bfloat16, written out (Jordan et al. 2024)."""
    x = update.bfloat16()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, polynomial, x, beta=3.4445)
    return (x.T if update.shape[0] > update.shape[1] else x).to(update.dtype)


def test_a_step_is_the_papers() -> None:
    """Momentum, orthogonal update, decay and ratio, by hand; singular values are about 1."""
    model = layers()
    gradients(model)
    weight, gradient = model[1].weight.detach().clone(), model[1].weight.grad
    optimizer = Muon(decay_groups(model), 0.02)
    optimizer.step()
    update = 0.05 * gradient * 0.95 + 0.05 * gradient  # the first mean is (1 - 0.95) x gradient
    expected = weight * (1 - 0.02 * 0.1) - 0.02 * 0.2 * math.sqrt(16) * orthogonal(update)
    torch.testing.assert_close(model[1].weight.detach(), expected, rtol=0, atol=1e-6)
    change = (model[1].weight.detach() - weight * (1 - 0.02 * 0.1)) / (0.02 * 0.2 * math.sqrt(16))
    assert all(0.5 < value < 1.5 for value in torch.linalg.svdvals(change).tolist())


class Deep(Line):
    """A task under Muon with a rate that falls each step."""

    def make_model(self) -> nn.Module:
        """Return two matrices and a head."""
        return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 1))

    def configure_optimizers(self) -> Any:
        """Return it."""
        optimizer = Muon(decay_groups(self), 0.02, adamw_lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Stopped inside an epoch and resumed, the weights are those of the run that never stopped."""
    tasks = [Deep() for _ in range(3)]
    quiet(tmp_path / "whole", max_steps=9).fit(tasks[0], loader(23))
    quiet(tmp_path / "parts", max_steps=4, enable_checkpointing=True).fit(tasks[1], loader(23))
    quiet(tmp_path / "parts", max_steps=9).fit(tasks[2], loader(23), ckpt_path="last")
    assert torch.equal(weights(tasks[2]), weights(tasks[0]))
    assert not torch.equal(weights(tasks[1]), weights(tasks[0]))


def test_the_contract_scales_and_moves_both_rates(tmp_path: Path) -> None:
    """Factor, warm-up and schedule reach each group."""
    trainer = quiet(
        tmp_path, max_steps=2, lr_scaling="sqrt", lr_reference_batch_size=1, lr_warmup_steps=4
    )
    trainer.fit(Deep(), loader(23))
    assert trainer.run is not None
    rates = trainer.run.rates.last()
    assert rates == pytest.approx([0.02 * 2 * 0.9 * 0.5, *[0.01 * 2 * 0.9 * 0.5] * 2])


def test_a_group_that_is_added_is_adamws() -> None:
    """As one that fine-tuning unfreezes."""
    optimizer = Muon(decay_groups(layers()))
    added = nn.Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [added], "lr": 0.5})
    added.grad = torch.ones(2, 2)
    optimizer.step()
    torch.testing.assert_close(added.detach(), torch.full((2, 2), 1 - 0.5 * 0.1 - 0.5))


def test_a_step_reads_nothing_off_the_device() -> None:
    """The step of both is all tensors."""
    model = layers()
    optimizer = Muon(decay_groups(model))
    gradients(model)
    with SyncGuard(torch.device("cpu")):
        optimizer.step()
        optimizer.step()


@pytest.mark.parametrize(
    ("model", "adamw", "words"),
    [
        (nn.Linear(4, 2), None, r"no matrix for Muon, .*AdamW's: weight\. optimizer\.adamw=\[\]"),
        (nn.LayerNorm(4), None, r"no matrix for Muon, .* biases\. Use optimizer=adamw"),
        (
            layers(),
            ["1.weigth"],
            r"has '1\.weigth', .* Did you mean '1\.weight'\? There are 0\.weight, 1\.weight",
        ),
        (layers(), "1.weight", r"'1\.weight'; it must be a list .*: \[1\.weight\]"),
    ],
)
def test_a_wrong_split_is_refused(model: nn.Module, adamw: Any, words: str) -> None:
    """The error names what is legal: the nearest name, a list, another optimizer."""
    with pytest.raises(ConfigError, match=words):
        Muon(decay_groups(model), adamw=adamw)


def test_parameters_without_their_model_are_refused() -> None:
    """It cannot know an embedding from a matrix by the tensor alone."""
    with pytest.raises(ConfigError, match=re.escape("Muon(trainkit.optim.decay_groups(self))")):
        Muon(layers().parameters())  # type: ignore[arg-type]
