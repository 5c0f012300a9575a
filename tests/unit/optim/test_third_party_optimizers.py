"""Optimizers of other packages: states, wrappers and rates in forms that torch's own do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.helpers.toy import Line, loader, quiet, weights
from trainkit.errors import CheckpointError


class Counting(torch.optim.SGD):
    """SGD whose momentum grows; it counts its steps as MADGRAD does: beside the weights in its
    state.
    """

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Take a step."""
        count = self.state.setdefault("k", torch.tensor(0.0))  # type: ignore[arg-type, call-overload]
        self.param_groups[0]["momentum"] = float(0.9 - 0.5 / (1 + count))
        count += 1
        return super().step(closure)


class Lookahead(torch.optim.Optimizer):
    """Every second step goes back by a half (Zhang et al. 2019); made around another optimizer, as
    timm's and pytorch_optimizer's, without torch's __init__.
    """

    def __init__(self, base: torch.optim.Optimizer, own_form: bool) -> None:
        self.base, self.own_form = base, own_form
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.slow = [w.detach().clone() for group in self.param_groups for w in group["params"]]
        self.count = 0
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's."""
        return self.base.state

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Take a step of the inner optimizer."""
        self.base.step()
        self.count += 1
        if self.count % 2 == 0:
            weights = [w for group in self.param_groups for w in group["params"]]
            for weight, slow in zip(weights, self.slow, strict=True):
                weight.data.copy_(slow.lerp_(weight.data, 0.5))

    def state_dict(self) -> dict[str, Any]:
        """Return both optimizers' states, in a form of its own or as torch's."""
        own = {"count": self.count, "slow": self.slow}
        base = self.base.state_dict()
        return {"own": own, "base": base} if self.own_form else {**base, **own}

    def load_state_dict(self, state: Any) -> None:
        """Restore them."""
        own = state["own"] if self.own_form else state
        self.count, self.slow = own["count"], [tensor.clone() for tensor in own["slow"]]
        self.base.load_state_dict(state["base"] if self.own_form else state)
        self.param_groups = self.base.param_groups


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: Counting(weights, lr=0.05),
        lambda weights: Lookahead(torch.optim.SGD(weights, lr=0.05, momentum=0.9), True),
        lambda weights: Lookahead(torch.optim.SGD(weights, lr=0.05, momentum=0.9), False),
        lambda weights: torch.optim.SGD(weights, lr=torch.tensor(0.05), momentum=0.9),
    ],
    ids=["state_of_its_own", "wrapper", "wrapper_in_torchs_form", "rate_in_a_tensor"],
)
def test_they_train_as_by_hand_and_resume(make: Any, tmp_path: Path) -> None:
    """A run in two parts has the weights of one, and one those of a loop by hand."""

    def fit(folder: str, steps: int, **options: Any) -> torch.Tensor:
        task = Line()
        task.configure_optimizers = lambda: make(task.parameters())  # type: ignore[method-assign]
        settings: dict[str, Any] = {"enable_checkpointing": True}
        quiet(tmp_path / folder, max_steps=steps, **settings).fit(task, loader(23), **options)
        return weights(task)

    by_hand = Line()
    optimizer = make(by_hand.parameters())
    for place, batch in enumerate([*loader(23)] * 2):
        if place < 9:
            optimizer.zero_grad()
            functional.mse_loss(by_hand(batch[0]), batch[1]).backward()
            optimizer.step()
    whole = fit("whole", 9)
    assert torch.equal(whole, weights(by_hand))
    fit("parts", 5)
    assert torch.equal(fit("parts", 9, ckpt_path="last"), whole)


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_a_state_of_another_form_is_refused(wrapped_first: bool, tmp_path: Path) -> None:
    """A wrapper's own form of state says nothing to torch's optimizers, nor theirs to it."""
    for is_wrapped in (wrapped_first, not wrapped_first):
        task = Line()
        base = torch.optim.SGD(task.parameters(), lr=0.05)
        optimizer = Lookahead(base, own_form=True) if is_wrapped else base
        task.configure_optimizers = lambda made=optimizer: made  # type: ignore[method-assign, misc]
        trainer = quiet(tmp_path, max_steps=3, enable_checkpointing=True)
        if is_wrapped == wrapped_first:
            trainer.fit(task, loader())
            continue
        with pytest.raises(CheckpointError, match=r"it was another one than this run's (SGD|Look)"):
            trainer.fit(task, loader(), ckpt_path="last")
