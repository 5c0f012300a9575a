"""Which parameters decay, by kind."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from recipes.gpt import GPT
from trainkit.errors import ConfigError
from trainkit.optim import decay_groups

MODEL = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))


def test_only_matrices_decay() -> None:
    """Weights of convolutions and matrices decay; biases and norms do not."""
    decayed, plain = decay_groups(MODEL, 0.1)
    assert [p.dim() for p in decayed["params"]] == [4, 2]
    assert [p.dim() for p in plain["params"]] == [1, 1, 1, 1]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_the_optimizers_own_decay_is_left() -> None:
    """Without a number the first group takes the optimizer's."""
    optimizer = torch.optim.SGD(decay_groups(MODEL), lr=0.1, weight_decay=0.3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


def test_frozen_parameters_are_grouped_too() -> None:
    """A frozen parameter may be unfrozen later, and is the optimizer's from the start."""
    line = nn.Linear(2, 2)
    line.bias.requires_grad_(False)
    assert [group["params"] for group in decay_groups(line)] == [[line.weight], [line.bias]]


def test_empty_groups_are_left_out() -> None:
    """A group without parameters is not made."""
    (group,) = decay_groups(nn.Linear(2, 2, bias=False))
    assert "weight_decay" not in group


def without_decay(model: nn.Module, *kinds: str) -> set[str]:
    """Return the names of the parameters that do not decay if these kinds do not."""
    groups = decay_groups(model, no_weight_decay=kinds)
    plain = {p for group in groups if group.get("weight_decay") == 0 for p in group["params"]}
    return {name for name, p in model.named_parameters() if p in plain}


def test_each_kind_is_chosen_by_itself() -> None:
    """Norm, bias and embedding of a transformer are separate; all other weights always decay."""
    model = GPT(context=8, width=8, depth=1, heads=2)
    assert without_decay(model) == set()
    # the tied head is the first of these
    assert without_decay(model, "embedding") == {"tokens.weight", "places.weight"}
    assert without_decay(model, "norm") == {
        "blocks.0.norm1.weight",
        "blocks.0.norm2.weight",
        "norm.weight",
    }
    biases = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    assert without_decay(model, "bias") == biases and len(biases) == 7
    assert without_decay(model, "bias", "norm") == {
        name for name, p in model.named_parameters() if p.dim() == 1
    }


def test_positions_and_class_tokens_are_embeddings() -> None:
    """Bare parameters of a vision transformer count as embeddings,
    and biases of its attention as biases.
    """
    model = torchvision.models.VisionTransformer(32, 16, 1, 2, 8, 16, num_classes=3)
    assert without_decay(model, "embedding") == {"class_token", "encoder.pos_embedding"}
    assert "encoder.layers.encoder_layer_0.self_attention.in_proj_bias" in without_decay(
        model, "bias"
    )


def test_tables_of_relative_positions_are_embeddings() -> None:
    """Swin's, which torchvision's and timm's own recipes leave without decay."""
    model = torchvision.models.SwinTransformer([4, 4], 8, [2], [2], [4, 4], num_classes=3)
    assert without_decay(model, "embedding") == {
        f"features.1.{block}.attn.relative_position_bias_table" for block in (0, 1)
    }


def test_a_norm_of_several_dimensions_does_not_decay() -> None:
    """A norm is known by its class, not by its shape:
    LayerNorm over [3, 3] has a matrix of scales.
    """
    assert without_decay(nn.Sequential(nn.LayerNorm([3, 3]), nn.Linear(3, 3)), "norm") == {
        "0.weight"
    }


def test_another_kind_is_refused() -> None:
    """The error names the kinds, and the nearest."""
    with pytest.raises(
        ConfigError,
        match=r"has 'norms'; it is a list of norm, bias, embedding: .* Did you mean 'norm'\?",
    ):
        decay_groups(MODEL, no_weight_decay=["norms"])
