"""Dropout switched off, and random numbers noted: masks are other ones at another number of ranks,
in a correct training too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_DROPOUTS = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
}
_OF_TORCH = {torch.dropout, torch.alpha_dropout, torch.feature_dropout}
_OF_TORCH |= {torch.feature_alpha_dropout, torch.dropout_, torch.alpha_dropout_}
_DRAWS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"}
_DRAWS |= {"bernoulli", "bernoulli_", "multinomial", "normal", "normal_", "uniform_"}
_DRAWS |= {"exponential_", "random_", "rrelu", "gumbel_softmax"}


class WithoutDropout(TorchFunctionMode):
    """Within the context, functions of dropout return their input.

    Args:
        on_draw: is called with the name of each other function that draws random numbers.
    """

    def __init__(self, on_draw: Callable[[str], None]) -> None:
        super().__init__()
        self._on_draw = on_draw
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            self.calls += bool(kwargs.get("training", True))
            kwargs["training"] = False
            args = args[:2]
        elif func in _OF_TORCH:
            return args[0] if args else kwargs["input"]
        elif func is functional.scaled_dot_product_attention:
            self.calls += bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
            kwargs["dropout_p"] = 0.0
            kwargs |= dict(zip(("is_causal", "scale"), args[5:], strict=False))
            args = args[:4]
        elif getattr(func, "__name__", "") in _DRAWS:
            self._on_draw(func.__name__)
        return func(*args, **kwargs)


def switch_off_layers(model: nn.Module) -> list[str]:
    """Set the dropout of layers to 0; return the names of those that had any."""
    names = []
    for name, module in model.named_modules():
        key = "dropout" if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) else "p"
        is_dropout = key == "dropout" or isinstance(module, nn.modules.dropout._DropoutNd)
        if is_dropout and getattr(module, key):
            setattr(module, key, 0.0)
            names.append(name)
    return names
