"""LARS and LAMB against their papers' algorithms, written out in plain floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.toy import Line, Net, loader, quiet, weights
from trainkit.config.instantiate import Factory
from trainkit.device.sync_guard import SyncGuard
from trainkit.errors import ConfigError
from trainkit.optim import LAMB, LARS, decay_groups

STEPS = 5
START = {
    "matrix": [0.5, -1.0, 2.0, 0.25, 1.5, -0.75],
    "bias": [0.1, -0.2],
    "zeros": [0.0, 0.0, 0.0, 0.0],
}
SHAPES = {"matrix": (2, 3), "bias": (2,), "zeros": (2, 2)}


def gradient(name: str, step: int) -> list[float]:
    """Return made-up gradients, other ones in each step; the matrix has none in step 3."""
    if name == "matrix" and step == 3:
        return [0.0] * 6
    return [math.sin(1 + i + 7 * step + len(name)) for i in range(len(START[name]))]


def norm(values: list[float]) -> float:
    """Return the 2-norm."""
    return math.sqrt(sum(v * v for v in values))


def ours(
    make: Callable[..., Any], rates: list[float], momenta: list[float] | None = None
) -> dict[str, list[float]]:
    """Return the parameters after steps of our optimizer, in float64."""
    parameters = {
        n: nn.Parameter(torch.tensor(v, dtype=torch.float64).reshape(SHAPES[n]))
        for n, v in START.items()
    }
    optimizer = make(list(parameters.values()))
    for step, lr in enumerate(rates):
        optimizer.param_groups[0]["lr"] = lr
        if momenta is not None:
            optimizer.param_groups[0]["momentum"] = momenta[step]
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(gradient(name, step), dtype=torch.float64).reshape(
                SHAPES[name]
            )
        optimizer.step()
    return {name: parameter.detach().flatten().tolist() for name, parameter in parameters.items()}


def papers_lars(
    rates: list[float], m: float, decay: float, eta: float, layers: set[str]
) -> dict[str, list[float]]:
    """You et al. 2017, algorithm 1: v = m v + lr ratio (g + decay w); w = w - v.
    Other layers have a ratio of 1.
    """
    w, v = {n: list(x) for n, x in START.items()}, {n: [0.0] * len(x) for n, x in START.items()}
    for step, lr in enumerate(rates):
        for n in w:
            g = gradient(n, step)
            below = norm(g) + decay * norm(w[n])
            ratio = (
                eta * norm(w[n]) / below if n in layers and norm(w[n]) > 0 and below > 0 else 1.0
            )
            for i in range(len(w[n])):
                v[n][i] = m * v[n][i] + lr * ratio * (g[i] + decay * w[n][i])
            w[n] = [a - b for a, b in zip(w[n], v[n], strict=True)]
    return w


def papers_lamb(
    lr: float, b1: float, b2: float, eps: float, decay: float, layers: set[str]
) -> dict[str, list[float]]:
    """You et al. 2020, algorithm 2, with phi the identity. Other layers have a ratio of 1."""
    w = {n: list(x) for n, x in START.items()}
    m, v = ({n: [0.0] * len(x) for n, x in START.items()} for _ in range(2))
    for step in range(STEPS):
        for n in w:
            g = gradient(n, step)
            m[n] = [b1 * a + (1 - b1) * b for a, b in zip(m[n], g, strict=True)]
            v[n] = [b2 * a + (1 - b2) * b * b for a, b in zip(v[n], g, strict=True)]
            r = [
                a / (1 - b1 ** (step + 1)) / (math.sqrt(b / (1 - b2 ** (step + 1))) + eps)
                + decay * x
                for a, b, x in zip(m[n], v[n], w[n], strict=True)
            ]
            ratio = norm(w[n]) / norm(r) if n in layers and norm(w[n]) > 0 and norm(r) > 0 else 1.0
            w[n] = [x - lr * ratio * y for x, y in zip(w[n], r, strict=True)]
    return w


LAYERS = {"matrices": {"matrix", "zeros"}, "all": set(START), "none": set()}


def assert_same(own: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    """Compare to rounding."""
    for name in START:
        assert own[name] == pytest.approx(expected[name], rel=1e-12, abs=1e-14), name


@pytest.mark.parametrize("adapt", LAYERS)
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_lars_is_the_papers(adapt: Any, momentum: float) -> None:
    """At a constant rate LARS is algorithm 1;
    layers of zeros, and those left out, take the plain rate.
    """
    rates = [2.0] * STEPS
    own = ours(lambda p: LARS(p, 2.0, momentum, 0.01, trust_coefficient=0.02, adapt=adapt), rates)
    assert_same(own, papers_lars(rates, momentum, 0.01, 0.02, LAYERS[adapt]))


def test_lars_has_the_papers_momentum_without_correction() -> None:
    """If the rate changes, momentum x (last rate / rate), as lr_momentum_correction=false sets it,
    gives algorithm 1.
    """
    rates = [1.0, 2.0, 3.0, 1.5, 0.5]
    momenta = [0.9 * last / lr for last, lr in zip([1.0, *rates], rates, strict=False)]
    own = ours(lambda p: LARS(p, 1.0, 0.9, 0.01), rates, momenta)
    assert_same(own, papers_lars(rates, 0.9, 0.01, 0.001, LAYERS["matrices"]))


@pytest.mark.parametrize("adapt", LAYERS)
def test_lamb_is_the_papers(adapt: Any) -> None:
    """LAMB is algorithm 2; layers of zeros, and those left out, take the plain rate."""
    own = ours(lambda p: LAMB(p, 0.05, (0.8, 0.95), 1e-6, 0.02, adapt=adapt), [0.05] * STEPS)
    assert_same(own, papers_lamb(0.05, 0.8, 0.95, 1e-6, 0.02, LAYERS[adapt]))


def test_lars_without_ratios_is_sgd() -> None:
    """With adapt="none" LARS is torch's SGD."""
    rates = [0.1, 0.2, 0.3, 0.2, 0.1]
    assert_same(
        ours(lambda p: LARS(p, 0.1, 0.9, 0.01, adapt="none"), rates),
        ours(lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01), rates),
    )


@pytest.mark.parametrize("cls", [LARS, LAMB])
def test_options_are_a_groups_own(cls: Any) -> None:
    """A group's options win over the constructor's, and a parameter without gradient stays."""
    matrix, other, idle = (nn.Parameter(torch.full((2, 2), start)) for start in (3.0, 1.0, 1.0))
    optimizer = cls(
        [{"params": [matrix]}, {"params": [other, idle], "adapt": "none", "weight_decay": 0.0}],
        lr=0.5,
    )
    matrix.grad, other.grad = torch.ones(2, 2), torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(idle, torch.ones(2, 2))
    assert idle not in optimizer.state
    assert torch.allclose(other, torch.full((2, 2), 0.5))
    assert not torch.allclose(matrix, torch.full((2, 2), 2.5), atol=0.01)


@pytest.mark.parametrize("cls", [LARS, LAMB])
def test_a_step_reads_nothing_off_the_device(cls: Any) -> None:
    """The step of an optimizer is all tensors."""
    model = Net()
    optimizer = cls(decay_groups(model), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with SyncGuard(torch.device("cpu")):
        optimizer.step()
        optimizer.step()


class Made(Net):
    """Dropout and batch norm under an optimizer that the test gives."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        """Return the optimizer with a rate that falls each step."""
        optimizer = self.make(decay_groups(self))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize(
    "make",
    [lambda p: LARS(p, 3.0, weight_decay=0.01), lambda p: LAMB(p, 0.01)],
    ids=["lars", "lamb"],
)
def test_a_run_resumes_bit_for_bit(tmp_path: Path, make: Any) -> None:
    """Stopped inside an epoch and resumed, the weights are those of the run that never stopped."""
    tasks = [Made(make) for _ in range(3)]
    quiet(tmp_path / "whole", max_steps=9).fit(tasks[0], loader(23))
    quiet(tmp_path / "parts", max_steps=4, enable_checkpointing=True).fit(tasks[1], loader(23))
    quiet(tmp_path / "parts", max_steps=9).fit(tasks[2], loader(23), ckpt_path="last")
    assert torch.equal(weights(tasks[2]), weights(tasks[0]))
    assert not torch.equal(weights(tasks[1]), weights(tasks[0]))


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(
    "make",
    [lambda p: LARS(p, 0.1, trust_coefficient=0.1), lambda p: LAMB(p, 0.01)],
    ids=["lars", "lamb"],
)
def test_they_train_in_half_precision(tmp_path: Path, make: Any, precision: Any) -> None:
    """Under a loss scale, under autocast and with weights in bfloat16 the loss falls."""

    class Short(Line):
        def configure_optimizers(self) -> Any:
            return make(self.parameters())

    task = Short()
    trainer = quiet(tmp_path, precision=precision, max_epochs=20, num_sanity_val_steps=0)
    before = quiet(tmp_path, precision=precision).validate(Short(), loader(23))["val/loss"]
    trainer.fit(task, loader(23), loader(23))
    assert trainer.callback_metrics["val/loss"] < 0.7 * before


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda p: LARS(p, momentum=1.0),
            r"LARS: momentum is 1\.0; it must be 0 or more and below 1\.",
        ),
        (lambda p: LARS(p, lr=-1.0), r"LARS: lr is -1\.0; it must be 0 or more\."),
        (lambda p: LARS([{"params": p, "weight_decay": -0.1}]), r"LARS: weight_decay is -0\.1"),
        (
            lambda p: LARS(p, adapt="biases"),
            "LARS: adapt is 'biases'; it must be one of 'matrices', 'all', 'none'",
        ),
        (
            lambda p: LAMB(p, betas=(0.9, 1.0)),
            r"LAMB: betas is \(0\.9, 1\.0\); it must be 0 or more and below 1\.",
        ),
        (lambda p: LAMB(p, eps=-1e-6), "LAMB: eps is -1e-06"),
    ],
)
def test_options_out_of_range_are_refused(make: Any, words: str) -> None:
    """A wrong option is refused; the error names the legal values."""
    with pytest.raises(ConfigError, match=words):
        make([nn.Parameter(torch.ones(2))])


def test_a_sparse_gradient_is_refused() -> None:
    """There is no ratio for a sparse gradient."""
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = LAMB(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="take no sparse gradients"):
        optimizer.step()


def test_a_config_may_name_them() -> None:
    """A factory of the command line passes on values of a yaml: a list for betas."""
    optimizer = Factory(LAMB, {"lr": 0.1, "betas": [0.9, 0.99]}, "optimizer")(
        decay_groups(nn.Linear(2, 2))
    )
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.99)
