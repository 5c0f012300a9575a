"""engine.param_dtype: what is cast are the inputs of modules, not the batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method
from torch.nn import functional

from trainkit.errors import TaskError
from trainkit.extensions.fsdp.units import explaining_dtypes, split_units

EXACT = 1234567.0  # which bfloat16 rounds to 1236992, and float16 to infinity


class Block(nn.Module):
    """A layer that is gathered by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return as many features."""
        return x_BD + self.layer(x_BD)


class Scaled(nn.Module):
    """A module with a weight of its own, and inputs by name and in tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, pair: tuple[Tensor, Tensor], *, scale_D: Tensor) -> Tensor:
        """Return the first of the pair, of which the second is an index."""
        assert pair[1].dtype == torch.int64
        return pair[0] @ (self.weight * scale_D)


class Step(nn.Module):
    """A Task's step, with modules of the last group: a first layer, a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scaled, self.norm, self.head = Scaled(), nn.LayerNorm(4), nn.Linear(4, 1)
        self.bias = nn.Parameter(torch.zeros(1))
        self.seen: list[Any] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss; note dtypes."""
        x_BD, y_B1 = batch
        hidden_BD = self.scaled((self.first(x_BD), torch.arange(2)), scale_D=torch.ones(4))
        for block in self.blocks:
            hidden_BD = block(hidden_BD)
        # the sum of half precision and of the batch's float32 is float32
        answer_B1 = self.head(self.norm(hidden_BD + x_BD)) + self.bias
        self.seen = [hidden_BD.dtype, answer_B1.dtype, y_B1.dtype, y_B1.max().item()]
        return functional.mse_loss(answer_B1, y_B1 / EXACT)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """One rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def split(step: Step, dtype: torch.dtype | None) -> Step:
    """Split as engine=fsdp does."""
    options = {
        "mesh": init_device_mesh("cpu", (1,)),
        "mp_policy": MixedPrecisionPolicy(dtype, None if dtype is None else torch.float32),
    }
    split_units(step, list(step.blocks), set(), options)
    register_fsdp_forward_method(step, "training_step")
    return step


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_targets_stay_what_they_are(dtype: torch.dtype) -> None:
    """Modules compute in half precision, whatever group has their weights; gradients are those of
    float32, about.
    """
    torch.manual_seed(1)
    plain = Step()
    task = split(Step(), dtype)
    batch = torch.rand(2, 4), torch.full((2, 1), EXACT)
    whole = {name: own.detach().clone() for name, own in plain.named_parameters()}
    with torch.no_grad():
        for name, own in task.named_parameters():
            own.to_local().copy_(whole[name])
    expected, loss = plain.training_step(batch, 0), task.training_step(batch, 0)
    assert task.seen == [dtype, dtype, torch.float32, EXACT]
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)
    expected.backward()
    loss.backward()
    for (name, own), other in zip(task.named_parameters(), plain.parameters(), strict=True):
        assert own.dtype == own.grad.dtype == torch.float32, name
        torch.testing.assert_close(own.grad.to_local(), other.grad, rtol=0.1, atol=0.02)


@pytest.mark.usefixtures("alone")
def test_nothing_is_cast_without_it() -> None:
    """All is float32."""
    task = split(Step(), None)
    task.training_step((torch.rand(2, 4), torch.full((2, 1), EXACT)), 0)
    assert task.seen == [torch.float32] * 3 + [EXACT]


@pytest.mark.parametrize(
    "fails",
    [
        lambda out, y: functional.huber_loss(out, y).backward(),
        lambda out, y: functional.binary_cross_entropy(out.sigmoid(), y).backward(),
        lambda out, y: y @ out,
        lambda out, y: functional.conv1d(y[None], out[None]),
    ],
)
def test_what_torch_cannot_mix_is_explained(fails: Any) -> None:
    """A loss whose backward takes one dtype alone, and a product with the batch itself."""
    out = torch.rand(2, 2).bfloat16().requires_grad_()
    with pytest.raises(TaskError, match=r"engine\.param_dtype is 'bf16'.*\.float\(\)"):
        explaining_dtypes(fails, "bf16")(out, torch.rand(2, 2))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        explaining_dtypes(lambda: torch.rand(2, 3) @ torch.rand(2, 3), "bf16")()
