"""AdEMAMix and SOAP of pytorch_optimizer: their steps, on whole weights; tests/parallel has ranks."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.toy import Net, loader, quiet, weights
from trainkit.optim import SOAP, AdEMAMix, decay_groups

package = pytest.importorskip("pytorch_optimizer")
Make = Callable[..., torch.optim.Optimizer]
SOON: dict[str, Make] = {
    "ademamix": lambda groups: AdEMAMix(groups, 0.05, t_alpha_beta3=6, weight_decay=0.1),
    "soap": lambda groups: SOAP(groups, 0.02, precondition_frequency=2),
}


class Made(Net):
    """A task under one of them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.make = SOON[name]

    def configure_optimizers(self) -> Any:
        """Return it."""
        return self.make(decay_groups(self))


def model(width: int = 64) -> nn.Module:
    """Return a model whose first gradients leave most directions out."""
    torch.manual_seed(0)
    wide = [nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*wide, nn.Linear(width, 1))


@pytest.mark.parametrize("name", [*SOON])
def test_a_run_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Stopped inside an epoch and resumed, the weights are those of the run that never stopped."""
    tasks = [Made(name) for _ in range(3)]
    quiet(tmp_path / "whole", max_steps=9).fit(tasks[0], loader(23))
    quiet(tmp_path / "parts", max_steps=5, enable_checkpointing=True).fit(tasks[1], loader(23))
    quiet(tmp_path / "parts", max_steps=9).fit(tasks[2], loader(23), ckpt_path="last")
    assert torch.equal(weights(tasks[2]), weights(tasks[0]))
    assert not torch.equal(weights(tasks[1]), weights(tasks[0]))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda p: AdEMAMix(p, 0.01, alpha=3.0, weight_decay=0.1),
            lambda p: package.AdEMAMix(p, 0.01, alpha=3.0, weight_decay=0.1, weight_decouple=True),
        ),
        (
            lambda p: SOAP(p, 0.01, precondition_frequency=3),
            lambda p: package.SOAP(p, 0.01, precondition_frequency=3),
        ),
    ],
)
def test_steps_in_float32_are_the_packages(ours: Make, theirs: Make) -> None:
    """Bit for bit."""
    one = model()
    other = copy.deepcopy(one)
    pairs = [(one, ours(one.parameters())), (other, theirs(other.parameters()))]
    for step in range(8):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        for net, optimizer in pairs:
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    assert torch.equal(weights(one), weights(other))
    assert not torch.equal(weights(one), weights(model()))


def test_ademamix_is_the_papers() -> None:
    """Three steps of algorithm 1 by hand, with alpha and beta3 that grow (equations 3 and 4)."""
    lr, (b1, b2, b3), alpha, steps, decay = 0.1, (0.9, 0.99, 0.999), 5.0, 6, 0.2
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = AdEMAMix([weight], lr, (b1, b2, b3), alpha, steps, 1e-8, decay)
    expected = weight.detach().clone()
    fast, slow, square = (torch.zeros_like(expected) for _ in range(3))
    for t in range(1, 4):
        weight.grad = torch.tensor([0.3, -0.1 * t], dtype=torch.float64)
        optimizer.step()
        share = t / steps
        log1, log3 = math.log(b1), math.log(b3)
        now = min(math.exp(log1 * log3 / ((1 - share) * log3 + share * log1)), b3)
        fast = b1 * fast + (1 - b1) * weight.grad
        slow = now * slow + (1 - now) * weight.grad
        square = b2 * square + (1 - b2) * weight.grad**2
        mixed = fast / (1 - b1**t) + min(share * alpha, alpha) * slow
        root = (square / (1 - b2**t)).sqrt() + 1e-8
        expected = expected - lr * (mixed / root + decay * expected)
        torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-14)


def ends(make: Make, num_parts: int) -> Tensor:
    """Return the weights after 30 steps in float64, with gradients that are summed in parts."""
    net = model().double()
    optimizer = make(net.parameters())
    draws = torch.Generator().manual_seed(1)
    for _ in range(30):
        x = torch.randn(8, 8, dtype=torch.float64, generator=draws)
        optimizer.zero_grad()
        for part in x.chunk(num_parts):
            ((net(part) - 1).square().sum() / 8).backward()
        optimizer.step()
    return weights(net)


@pytest.mark.parametrize("name", [*SOON])
def test_the_order_of_a_sum_turns_no_direction(name: str) -> None:
    """Gradients whose last bits differ, as those of ranks do, lead to the same weights; SOAP of the
    package itself takes directions that no gradient has had from those bits.
    """
    one, four = ends(SOON[name], 1), ends(SOON[name], 4)
    assert not torch.equal(one, four)
    torch.testing.assert_close(one, four, rtol=0, atol=1e-12)
    if name == "soap":
        theirs = [ends(lambda p: package.SOAP(p, 0.02), num) for num in (1, 4)]
        assert (theirs[0] - theirs[1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["ademamix", "soap"])
def test_without_the_package_the_extra_is_named(name: str) -> None:
    """The error says what to install."""
    code = (
        "import sys; sys.modules['pytorch_optimizer'] = None\n"
        "from trainkit.errors import ConfigError\n"
        f"try:\n import trainkit.extensions.optimizers.{name}\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=100
    )
    assert f"optimizer={name} needs pytorch_optimizer" in done.stdout, done.stderr
    assert "pip install 'trainkit[pytorch_optimizer]'" in done.stdout
