"""Optimizers of other packages: states, wrappers and rates in forms that torch's own do not have."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.nn import functional
from torch.utils._pytree import tree_map

from tests.helpers.third_party_optimizers import Counting, InBytes, Lookahead
from tests.helpers.toy import Line, loader, quiet, weights
from trainkit.checkpoint.split import fill_optimizer
from trainkit.errors import CheckpointError, TaskError
from trainkit.optim.forms import read_optimizers
from trainkit.optim.optimizer_state import parts_beside


@pytest.mark.parametrize(
    "make",
    [
        lambda weights: Counting(weights, lr=0.05),
        lambda weights: Lookahead(torch.optim.SGD(weights, lr=0.05, momentum=0.9), True),
        lambda weights: Lookahead(torch.optim.SGD(weights, lr=0.05, momentum=0.9), False),
        lambda weights: Lookahead(torch.optim.SGD(weights, lr=0.05, momentum=0.9), True, True),
        lambda weights: torch.optim.SGD(weights, lr=torch.tensor(0.05), momentum=0.9),
        InBytes,
    ],
    ids=[
        "state_of_its_own",
        "wrapper",
        "wrapper_in_torchs_form",
        "wrapper_with_groups",
        "rate_in_a_tensor",
        "in_bytes",
    ],
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


class Queue(torch.optim.SGD):
    """An optimizer with a state that no reader would take."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Remember the last gradients."""
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["last"] = deque([weight.grad], maxlen=2)
        return super().step(closure)


@pytest.mark.parametrize("saves", [True, False])
def test_a_state_that_cannot_be_saved_is_refused_after_one_step(
    saves: bool, tmp_path: Path
) -> None:
    """Not at the end of the first epoch, hours later."""
    task = Line()
    task.configure_optimizers = lambda: Queue(task.parameters(), lr=0.05)  # type: ignore[method-assign]
    trainer = quiet(tmp_path, max_epochs=2, enable_checkpointing=saves)
    if not saves:
        trainer.fit(task, loader(23))
        return
    with pytest.raises(
        TaskError,
        match=r"The checkpoint's optimizers\[0\]\.state\.0\.last is of type collections\.deque; .*"
        r"Take another optimizer, or give a subclass of it a state_dict\(\) and a load_state_dict\(\)",
    ):
        trainer.fit(task, loader(23))
    assert trainer.global_step == 1


@pytest.mark.parametrize("rate", [{}, {"lr": None}])
def test_an_optimizer_without_a_rate_is_refused(rate: dict[str, None]) -> None:
    """The Trainer scales, schedules and logs it; transformers' Adafactor with relative_step has
    None.
    """
    optimizer = torch.optim.SGD(Line().parameters())
    del optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0].update(rate)
    with pytest.raises(TaskError, match=r"SGD, whose parameter groups have no 'lr'.*group\['lr'\]"):
        read_optimizers(optimizer)


class Part(torch.Tensor):
    """A tensor that is spread over ranks, as DTensor."""

    def to_local(self) -> torch.Tensor:
        """Return this rank's part."""
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"own": {"slow": ["part"]}, "base": {}}, "own"),
        ({"state": {}, "param_groups": [], "slow": ["part"]}, "slow"),
        ({"state": {"last": "part"}, "param_groups": []}, "state"),
        ({"state": {0: {"momentum": "part"}, "k": 1}, "param_groups": [{"lr": 1.0}]}, None),
    ],
)
def test_parts_beside_the_weights_states_are_named(
    state: dict[str, Any], place: str | None
) -> None:
    """A resumed rank could not fill them; those of the weights have their weights' layout."""
    part = torch.ones(2).as_subclass(Part)
    made = tree_map(lambda value: part if value == "part" else value, state)
    assert parts_beside(made) == [place] * (place is not None)
    plain = {key: value for key, value in state.items() if key in ("state", "param_groups")}
    assert parts_beside(plain | {"slow": 1}, are_stages=True) == ["slow"]


@pytest.mark.parametrize("own_form", [True, False])
def test_ranks_with_parts_restore_what_is_beside_the_weights_states(own_form: bool) -> None:
    """Forms of their own, and values of any kind; the state of weights alone is in parts."""

    def make() -> Any:
        return Lookahead(torch.optim.SGD(Line().parameters(), lr=0.05), own_form)

    optimizer, other = make(), make()
    optimizer.count = 3
    optimizer.state["share"], optimizer.state["of"] = 0.5, {"steps": [1, 2]}
    fill_optimizer(other, optimizer.state_dict(), cast("Any", None))
    assert other.count == 3
    assert (other.state["share"], other.state["of"]) == (0.5, {"steps": [1, 2]})


@pytest.mark.parametrize("with_groups", [True, False])
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_a_state_of_another_form_is_refused(
    wrapped_first: bool, with_groups: bool, tmp_path: Path
) -> None:
    """A wrapper's own form of state says nothing to torch's optimizers, nor theirs to it."""
    for is_wrapped in (wrapped_first, not wrapped_first):
        task = Line()
        base = torch.optim.SGD(task.parameters(), lr=0.05)
        optimizer = Lookahead(base, True, with_groups) if is_wrapped else base
        task.configure_optimizers = lambda made=optimizer: made  # type: ignore[method-assign, misc]
        trainer = quiet(tmp_path, max_steps=3, enable_checkpointing=True)
        if is_wrapped == wrapped_first:
            trainer.fit(task, loader())
            continue
        with pytest.raises(CheckpointError, match=r"it was another one than this run's (SGD|Look)"):
            trainer.fit(task, loader(), ckpt_path="last")
