"""Precision by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.toy import Line, loader, quiet, weights
from trainkit.device.precision import Precision
from trainkit.errors import ConfigError
from trainkit.optim.clipping import clip
from trainkit.optim.fused import use_fused

CPU = torch.device("cpu")


@pytest.fixture
def dirty_memory() -> Iterator[None]:
    """Fill uninitialised memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


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
def test_what_computes_in_which_dtype(
    name: str, weights: torch.dtype, computed: torch.dtype, scaled: bool
) -> None:
    """Each name sets the dtype of weights and of layers, and whether the loss is scaled."""
    precision, model = Precision(name, CPU), torch.nn.Linear(2, 2)  # type: ignore[arg-type]
    precision.convert(model)
    with precision.autocast():
        out = model(torch.zeros(1, 2, dtype=precision.input_dtype))
    assert (model.weight.dtype, out.dtype) == (weights, computed)
    assert float(precision.scale(torch.ones(()))) == (65536.0 if scaled else 1.0)


@pytest.mark.parametrize(
    "options", [{}, {"fused": True}, {"fused": True, "dampening": 0.5}, {"fused": False}], ids=str
)
def test_an_update_that_is_held_back_leaves_no_momentum(
    options: dict[str, Any], dirty_memory: None
) -> None:
    """Uninitialised memory is no momentum:
    after a first update that overflows, the next is the first.
    """
    updated = []
    for factors in ((1.0,), (float("inf"), 1.0)):
        model, precision = torch.nn.Linear(2, 2), Precision("16-mixed", CPU)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD([model.weight], lr=0.1, momentum=0.9, **options)
        use_fused([optimizer])
        for factor in factors:
            precision.scale(model(torch.ones(1, 2)).sum() * factor).backward()
            precision.unscale([optimizer])
            assert precision.step([optimizer]) is (factor == 1.0)
            optimizer.zero_grad()
        updated.append(model.weight.detach())
    torch.testing.assert_close(updated[1], torch.full((2, 2), 0.9))
    assert torch.equal(updated[0], updated[1])


def test_an_unknown_precision_is_refused() -> None:
    """Names of Lightning's that are none here are answered with those that are."""
    with pytest.raises(
        ConfigError, match=r"trainer\.precision is '16'; it must be one of 32-true, 16-mixed"
    ):
        Precision("16", CPU)  # type: ignore[arg-type]


def test_fp16_with_an_optimizer_that_has_no_gradients(tmp_path: Path) -> None:
    """An optimizer whose parameters took no part in a step is
    passed over by the loss scaling too.
    """

    class Two(Line):
        def configure_optimizers(self) -> Any:
            self.idle = nn.Linear(1, 1)
            return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.model, self.idle)]

    task = Two()
    quiet(tmp_path, max_epochs=2, precision="16-mixed").fit(task, loader(8))
    assert task.idle.weight.grad is None


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_complex_weights_stay_complex(precision: Any) -> None:
    """A true precision is of real numbers."""
    model = nn.Linear(2, 2, dtype=torch.complex64)
    Precision(precision, CPU).convert(model)
    assert model.weight.is_complex()


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_an_overflow_holds_back_all_optimizers(loss: float, limit: float | None) -> None:
    """They are one step: clipped by one norm,
    the finite gradients would be NaN by the others' infinity.
    """
    precision, models = Precision("16-mixed", CPU), [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    before = [weights(model) for model in models]
    for model, factor in zip(models, (loss, 1.0), strict=True):
        precision.scale((model(torch.ones(1, 2)) * factor).sum()).backward()
    precision.unscale(optimizers)
    clip(optimizers, limit, "norm")
    assert not precision.step(optimizers)
    assert all(torch.equal(weights(model), was) for model, was in zip(models, before, strict=True))


class Reads(TorchDispatchMode):
    """Counts what the host reads off the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_a_step_waits_for_the_device_once(factor: float) -> None:
    """For the overflows of all optimizers together; the scale is halved if there is one."""
    precision, models = Precision("16-mixed", CPU), [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    for model in models:
        precision.scale((model(torch.ones(1, 2)) * factor).sum()).backward()
    precision.unscale(optimizers)
    with Reads() as reads:
        assert precision.step(optimizers) is math.isfinite(factor)
    assert reads.count == 1
    assert precision.scaler.get_scale() == 65536.0 * (1.0 if math.isfinite(factor) else 0.5)


def test_a_rank_without_a_sample_has_the_scale_of_the_checkpoint() -> None:
    """In a first step after a resume too: the others' gradients come by their sum, and the loss
    that would make the scale does not.
    """
    saved = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5} | {
        "growth_interval": 3,
        "_growth_tracker": 2,
    }
    precision, weight = Precision("16-mixed", CPU), nn.Parameter(torch.ones(2))
    precision.scaler.load_state_dict(saved)
    optimizer = SGD([weight], lr=1.0)
    weight.grad = torch.tensor([8.0, 16.0])
    precision.unscale([optimizer])
    assert precision.step([optimizer])
    assert weight.tolist() == [0.0, -1.0]
    assert precision.scaler.state_dict() == saved | {"scale": 16.0, "_growth_tracker": 0}


class Skips(Line):
    """Skips batches."""

    def __init__(self, skipped: set[int]) -> None:
        super().__init__(lr=10.0)
        self.skipped = skipped

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in self.skipped else loss / 100  # far from an overflow


@pytest.mark.parametrize("skipped", [{0}, {1, 2}, {3}])
def test_a_step_that_a_task_skips_leaves_weights_and_scale(
    skipped: set[int], tmp_path: Path
) -> None:
    """training_step returns None: the steps are those of full precision, but for rounding, and the
    loss scale has counted the others alone.
    """
    tasks, trainers = [], []
    for precision in ("16-mixed", "32-true"):
        tasks.append(Skips(skipped))
        trainers.append(quiet(tmp_path / precision, max_epochs=1, precision=precision))
        trainers[-1].fit(tasks[-1], loader(16))
    torch.testing.assert_close(weights(tasks[0]), weights(tasks[1]), rtol=0.01, atol=0.01)
    assert [trainer.global_step for trainer in trainers] == [4, 4]
    assert trainers[0].state.skipped_steps == 0
    assert trainers[0].precision.scaler.state_dict()["_growth_tracker"] == 4 - len(skipped)


def test_a_second_step_of_one_backward_is_no_skipped_one() -> None:
    """Its overflows are not known: it ends in an error, and leaves the weights."""
    precision, weight = Precision("16-mixed", CPU), nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], lr=1.0)
    precision.scale(weight.sum()).backward()
    precision.unscale([optimizer])
    assert precision.step([optimizer])
    with pytest.raises(RuntimeError, match="non-empty"):
        precision.step([optimizer])
    assert weight.tolist() == [0.0, 0.0]
