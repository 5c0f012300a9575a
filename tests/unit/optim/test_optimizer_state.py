"""What checkpoints hold of optimizers: tensors keep their dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.helpers.toy import Line, loader, quiet, weights


class ByScalars(Line):
    """A Line under an optimizer whose state has scalars in float32."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return self.kind(self.parameters(), lr=0.05)


class InFloat32(torch.optim.SGD):
    """SGD whose momentum is float32 whatever its weights are: a tensor, and one in a list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step by both."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for weight in group["params"]:
                zeros = torch.zeros_like(weight, dtype=torch.float32)
                own = self.state[weight]
                own.setdefault("momentum", zeros)
                own.setdefault(
                    "more", [zeros.clone(), {"steps": torch.zeros(1, dtype=torch.int64)}]
                )
                own["momentum"].mul_(0.9).add_(weight.grad.float())
                own["more"][0].mul_(0.7).add_(weight.grad.float())
                own["more"][1]["steps"] += 1
                update = own["momentum"] + own["more"][0]
                weight.sub_((group["lr"] * update).to(weight.dtype))
        return loss


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, InFloat32])
def test_the_state_of_an_optimizer_keeps_its_dtype(
    kind: Any, precision: Any, tmp_path: Path
) -> None:
    """torch casts NAdam's mu_product, ASGD's eta and tensors of more bits than the weights have to
    the weights' dtype when it loads them.
    """

    def fit(folder: str, steps: int, **options: Any) -> tuple[torch.Tensor, list[Any]]:
        task = ByScalars(kind)
        settings: dict[str, Any] = {"precision": precision, "enable_checkpointing": True}
        trainer = quiet(tmp_path / folder, max_steps=steps, **settings)
        trainer.fit(task, loader(23), **options)
        states = tree_leaves([*trainer.optimizers[0].state.values()])
        return weights(task), [(value.dtype, value) for value in states]

    whole, expected = fit("whole", 9)
    fit("parts", 5)
    resumed, state = fit("parts", 9, ckpt_path="last")
    assert torch.equal(resumed, whole)
    assert len(state) == len(expected)
    for (dtype, value), (own_dtype, own) in zip(expected, state, strict=True):
        assert own_dtype == dtype
        assert torch.equal(own, value)


def test_a_run_of_another_precision_casts_the_state(tmp_path: Path) -> None:
    """Adam's moments are of the weights' dtype, which they need to be."""
    for steps, precision, ckpt_path in ((3, "32-true", None), (5, "bf16-true", "last")):
        task = ByScalars(torch.optim.Adam)
        settings: dict[str, Any] = {"precision": precision, "enable_checkpointing": True}
        trainer = quiet(tmp_path, max_steps=steps, **settings)
        trainer.fit(task, loader(23), ckpt_path=ckpt_path)
    dtypes = {own["exp_avg"].dtype for own in trainer.optimizers[0].state.values()}
    assert dtypes == {torch.bfloat16}
