"""What checkpoints hold of optimizers: scalars keep their dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toy import Line, loader, quiet, weights


class ByScalars(Line):
    """A Line under an optimizer whose state has scalars in float32."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return self.kind(self.parameters(), lr=0.05)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_scalars_of_an_optimizer_keep_their_dtype(
    kind: Any, precision: Any, tmp_path: Path
) -> None:
    """torch casts NAdam's mu_product and ASGD's eta to the weights' dtype when it loads them."""

    def fit(folder: str, steps: int, **options: Any) -> tuple[torch.Tensor, list[Any]]:
        task = ByScalars(kind)
        settings: dict[str, Any] = {"precision": precision, "enable_checkpointing": True}
        trainer = quiet(tmp_path / folder, max_steps=steps, **settings)
        trainer.fit(task, loader(23), **options)
        states = trainer.optimizers[0].state.values()
        return weights(task), [(value.dtype, value) for own in states for value in own.values()]

    whole, expected = fit("whole", 9)
    fit("parts", 5)
    resumed, state = fit("parts", 9, ckpt_path="last")
    assert torch.equal(resumed, whole)
    assert len(state) == len(expected)
    for (dtype, value), (own_dtype, own) in zip(expected, state, strict=True):
        assert own_dtype == dtype
        assert torch.equal(own, value)
