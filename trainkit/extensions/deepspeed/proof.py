"""`torchrun -m trainkit.extensions.deepspeed.proof`: which stages and offloads run here, against
plain torch in one process.

Each kind trains a small model for three steps by AdamW; rank 0 prints a line of JSON for it.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.device.precision import Precision
from trainkit.engine.step_settings import StepSettings
from trainkit.extensions.deepspeed.engine import DeepSpeedEngine
from trainkit.extensions.deepspeed.extensions import choose_folder, is_built
from trainkit.launch.environment import read_launcher

KINDS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, optimizer in host memory": {"stage": 2, "offload_optimizer": "cpu"},
    "stage 3, optimizer and weights in host memory": {
        "stage": 3,
        "offload_optimizer": "cpu",
        "offload_param": "cpu",
    },
}
_STEPS = 3
_ROWS = 4
# else stage 3 keeps small weights whole
_SPLIT_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


class _Model(nn.Module):
    """A model with a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))

    def training_step(self, x: Tensor) -> Tensor:
        """Return the loss."""
        answer: Tensor = self.net(x)
        return (answer - x.sum(1, keepdim=True).tanh()).square().mean()


def _batch(step: int, ranks: int) -> Tensor:
    return torch.randn(ranks * _ROWS, 6, generator=torch.Generator().manual_seed(step))


def _expected(ranks: int) -> list[Tensor]:
    """Train in this process alone."""
    model = _Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(_STEPS):
        optimizer.zero_grad()
        model.training_step(_batch(step, ranks)).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def difference(options: dict[str, Any]) -> float:
    """Train with DeepSpeed on all ranks;
    return the largest difference of a weight from one process's.
    """
    engine = DeepSpeedEngine(config=_SPLIT_ALL, **options)
    with engine:
        ranks = engine.ranks.world_size
        device = engine.device
        model = _Model().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine.agree(StepSettings(_ROWS, 1, 0.1, "norm", "32-true"))
        engine.prepare(model, [optimizer], Precision("32-true", device))
        for step in range(_STEPS):
            own = _batch(step, ranks)[engine.ranks.rank * _ROWS :][:_ROWS].to(device)
            engine.backward(model.training_step(own) / ranks)
            engine.finish_gradients()
            engine.step(0.1)
        engine.release()
    pairs = zip(model.parameters(), _expected(ranks), strict=True)
    return max(float((own.detach().cpu() - other).abs().max()) for own, other in pairs)


def main() -> None:
    """Print a line for each kind."""
    with tempfile.TemporaryDirectory() as folder:
        kinds = dict(KINDS)
        if is_built(choose_folder(os.environ), "async_io"):
            kinds["stage 3, optimizer on disk"] = {
                "stage": 3,
                "offload_optimizer": "nvme",
                "nvme_path": folder,
            }
        _try_all(kinds)


def _try_all(kinds: dict[str, dict[str, Any]]) -> None:
    for name, options in kinds.items():
        try:
            outcome: dict[str, Any] = {"kind": name, "difference": difference(options)}
        except Exception as error:  # the kinds after it may run
            outcome = {"kind": name, "error": f"{type(error).__name__}: {error}"}
        if read_launcher().is_main:
            print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
