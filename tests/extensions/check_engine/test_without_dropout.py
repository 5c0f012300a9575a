"""Dropout is off within the context, however a model calls it; other random numbers are noted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit.extensions.check_engine.without_dropout import WithoutDropout, switch_off_layers

X = torch.ones(2, 3, 4)
CALLS: dict[str, Callable[[], Tensor]] = {
    "function": lambda: functional.dropout(X, 0.5),
    "keywords": lambda: functional.dropout(X, p=0.5, training=True),
    "alpha": lambda: functional.alpha_dropout(X, 0.5, True),
    "channels": lambda: functional.dropout1d(X, 0.5, True),
    "of torch": lambda: torch.dropout(X, 0.5, True),
    "in place": lambda: torch.dropout_(X.clone(), 0.5, True),
    "layer": lambda: nn.Dropout(0.5)(X),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_returns_its_input(name: str) -> None:
    """Each way to drop elements drops some outside of the context, and none inside."""
    assert not torch.equal(CALLS[name](), X)
    with WithoutDropout(lambda function: None):
        assert torch.equal(CALLS[name](), X)


@pytest.mark.parametrize("positional", [True, False])
def test_attention_drops_nothing(positional: bool) -> None:
    """A causal mask stays, however the arguments are given."""

    def attend(share: float) -> Tensor:
        if positional:
            return functional.scaled_dot_product_attention(X, X, values, None, share, True)
        return functional.scaled_dot_product_attention(
            X, X, values, dropout_p=share, is_causal=True
        )

    values = torch.arange(24.0).reshape(2, 3, 4)
    with WithoutDropout(lambda function: None) as mode:
        assert torch.equal(attend(0.9), attend(0.0))
    assert mode.calls == 1


def test_other_random_numbers_are_noted() -> None:
    """By the function's name; dropout is not among them."""
    drawn: list[str] = []
    with WithoutDropout(drawn.append):
        torch.rand(3)
        torch.ones(3).bernoulli_(0.5)
        functional.dropout(X, 0.5)
    assert drawn == ["rand", "bernoulli_"]


def test_layers_are_switched_off_and_named() -> None:
    """Those of recurrent layers and of attention too; layers without dropout are not named."""
    model = nn.ModuleDict(
        {
            "drop": nn.Dropout(0.1),
            "none": nn.Dropout(0.0),
            "lstm": nn.LSTM(4, 4, num_layers=2, dropout=0.2),
            "attention": nn.MultiheadAttention(4, 2, dropout=0.3),
        }
    )
    assert switch_off_layers(model) == ["drop", "lstm", "attention"]
    assert switch_off_layers(model) == []
