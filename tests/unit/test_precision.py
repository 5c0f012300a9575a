"""Precision by name."""

from __future__ import annotations

import pytest
import torch

from trainkit.errors import ConfigError
from trainkit.precision import Precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "weights", "computed", "scaled"),
    [
        ("32-true", torch.float32, torch.float32, False),
        ("64-true", torch.float64, torch.float64, False),
        ("bf16-true", torch.bfloat16, torch.bfloat16, False),
        ("bf16-mixed", torch.float32, torch.bfloat16, False),
        ("16-mixed", torch.float32, torch.float16, True),
    ],
)
def test_what_computes_in_which_dtype(name: str, weights: torch.dtype, computed: torch.dtype, scaled: bool) -> None:
    """Each name says in which dtype weights are held and layers compute, and whether the loss is scaled."""
    precision, model = Precision(name, CPU), torch.nn.Linear(2, 2)  # type: ignore[arg-type]
    precision.convert(model)
    with precision.autocast():
        out = model(torch.zeros(1, 2, dtype=precision.input_dtype))
    assert (model.weight.dtype, out.dtype) == (weights, computed)
    assert float(precision.scale(torch.ones(()))) == (65536.0 if scaled else 1.0)


def test_an_unknown_precision_is_refused() -> None:
    """Names of Lightning's that are none here are answered with those that are."""
    with pytest.raises(ConfigError, match=r"trainer\.precision is '16'; it must be one of 32-true, 16-mixed"):
        Precision("16", CPU)  # type: ignore[arg-type]
