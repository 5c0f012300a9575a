"""The fused implementation: selected unless the user chose another; and its requirements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Task, Trainer
from trainkit.optim.clipping import clear_gradients
from trainkit.optim.fused import use_fused

KINDS = [SGD, Adam, AdamW]


def is_fused(optimizer: Optimizer) -> bool:
    """Let the choice be made and return it."""
    use_fused([optimizer])
    return bool(optimizer.param_groups[0].get("fused"))


def momentum(kind: type[Optimizer]) -> dict[str, Any]:
    """Arguments with state."""
    return {"momentum": 0.9, "nesterov": True} if kind is SGD else {}


@pytest.mark.parametrize("kind", KINDS)
def test_it_makes_the_same_update(kind: type[Optimizer]) -> None:
    """The later choice makes the same update as the constructor's fused=True, and as the loop over
    parameters except for rounding.
    """
    updated = []
    for options in ({"fused": True}, {}, {"foreach": False}):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = kind(model.parameters(), lr=0.1, **momentum(kind), **options)
        assert is_fused(optimizer) is ("foreach" not in options)
        for _ in range(3):
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            clear_gradients([optimizer])
        updated.append(model.weight.detach())
    assert torch.equal(updated[0], updated[1])
    torch.testing.assert_close(updated[1], updated[2])


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}, {"fused": False}, {"differentiable": True}]
)
def test_what_the_user_chose_stays(options: dict[str, bool]) -> None:
    """A choice at the constructor is one, also the choice against it."""
    assert not is_fused(SGD(nn.Linear(2, 2).parameters(), lr=0.1, **options))


class Own(SGD):
    """A user's own optimizer."""


def test_others_have_none() -> None:
    """Optimizers without it, subclasses, rates that are tensors,
    dampened momenta and complex weights stay as they are.
    """
    model = nn.Linear(2, 2)
    assert not is_fused(RMSprop(model.parameters()))
    assert not is_fused(Adagrad(model.parameters()))
    assert not is_fused(Own(model.parameters(), lr=0.1))
    assert not is_fused(SGD(model.parameters(), lr=torch.tensor(0.1)))
    assert not is_fused(SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1))
    assert not is_fused(SGD([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1))


@pytest.mark.parametrize("kind", KINDS)
def test_elements_are_not_mixed_up(kind: type[Optimizer]) -> None:
    """Gradients and loaded states that lie in memory otherwise
    than the weights are laid out as these.
    """
    updated = []
    for options in ({}, {"fused": True}, {"foreach": False}):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        optimizer = kind([weight], lr=0.1, **momentum(kind), **options)
        assert is_fused(optimizer) is ("foreach" not in options)
        for i in range(3):
            weight.grad = torch.randn(2, 3, 4, 5)
            optimizer.step()
            if i == 1:
                state = optimizer.state_dict()
                own = {
                    k: v.contiguous() if isinstance(v, Tensor) else v
                    for k, v in state["state"][0].items()
                }
                optimizer.load_state_dict(
                    {"state": {0: own}, "param_groups": state["param_groups"]}
                )
        updated.append(weight.detach())
    torch.testing.assert_close(updated[0], updated[2])
    torch.testing.assert_close(updated[1], updated[2])


def with_gaps() -> nn.Parameter:
    """The first 3 of 6 rows of a matrix that is in memory column by column."""
    matrix = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    return nn.Parameter(matrix.t().contiguous().t()[:3])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_with_gaps_in_memory_are_updated_by_the_loop(kind: type[Optimizer]) -> None:
    """The fused implementation would write into the gaps, also if the user or a checkpoint chose
    it.
    """
    updated = []
    for options in ({}, {"fused": True}, {"foreach": False}):
        weight, other = with_gaps(), with_gaps()
        optimizer = kind([weight], lr=0.1, **momentum(kind), **options)
        assert is_fused(optimizer) is ("fused" in options)
        beyond = weight.detach().as_strided((3, 8), (1, 6), 3)
        before = beyond.clone()
        optimizer.add_param_group({"params": [other]})
        for i in range(4):
            for parameter in (weight, other):
                (parameter.square() * torch.arange(1.0, 9)).sum().backward()
            optimizer.step()
            clear_gradients([optimizer])
            if i == 1 and "foreach" not in options:
                state = optimizer.state_dict()
                for group in state["param_groups"]:
                    group["fused"] = True
                optimizer.load_state_dict(state)
        assert torch.equal(beyond, before)
        assert not any(group["fused"] for group in optimizer.param_groups)
        updated += [weight.detach(), other.detach()]
    for weight in updated:
        assert torch.equal(weight, updated[-1])


@pytest.mark.parametrize("more", [{}, {"dampening": 0.5, "nesterov": False}], ids=["", "dampened"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_may_begin_to_learn_later(kind: type[Optimizer], more: dict[str, Any]) -> None:
    """A part that has its first gradient after others (unfrozen, or not
    reached before) begins then, as in the loop.
    """
    if kind is not SGD:
        more = {}
    updated = []
    for options in ({}, {"fused": True}, {"foreach": False}):
        torch.manual_seed(0)
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = kind(parameters, lr=0.1, **momentum(kind) | more, **options)
        use_fused([optimizer])
        for i in range(4):
            outputs = first(torch.ones(2, 3))
            (second(outputs) if i > 1 else outputs).square().sum().backward()
            optimizer.step()
            clear_gradients([optimizer])
        updated.append([p.detach() for p in parameters])
    torch.testing.assert_close(updated[0], updated[2])
    torch.testing.assert_close(updated[1], updated[2])


def test_a_sparse_gradient_ends_it() -> None:
    """Rows are updated by the loop, which knows them, from the step on in which they come."""
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = SGD(table.parameters(), lr=1.0)
    assert is_fused(optimizer)
    before = table.weight.detach().clone()
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert (before - table.weight.detach())[:, 0].tolist() == [0, 1, 0, 0]
    assert not optimizer.param_groups[0]["fused"]


class Line(Task):
    """A line; notes how its optimizer makes the update."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.options = options
        self.was: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.was.append(self.trainer.optimizers[0].param_groups[0]["fused"])
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1, momentum=0.9, **self.options)


def fit(task: Task, folder: Path, steps: int, **options: Any) -> Task:
    """Train for some steps."""
    data = DataLoader(TensorDataset(torch.ones(16, 3)), 4)
    trainer = Trainer(
        max_steps=steps,
        engine="single",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        run_dir=str(folder),
    )
    trainer.fit(task, data, **options)
    return task


def test_a_fit_takes_it(tmp_path: Path) -> None:
    """By default it is fused; by the user's choice it is not."""
    assert fit(Line(), tmp_path / "a", 1).was == [True]
    assert fit(Line(fused=False), tmp_path / "b", 1).was == [False]


@pytest.mark.parametrize("begun", [{"fused": False}, {}])
def test_a_run_resumes_as_it_began(begun: dict[str, bool], tmp_path: Path) -> None:
    """A resumed run reaches the same bits, whatever the later choice."""
    whole = fit(Line(**begun), tmp_path / "whole", 3)
    fit(Line(**begun), tmp_path / "parts", 1)
    rest = fit(Line(), tmp_path / "parts", 3, ckpt_path="last")
    assert rest.was == [not begun, not begun]
    assert torch.equal(rest.model.weight, whole.model.weight)


class Noted(SGD):
    """Notes calls of its own zero_grad."""

    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


def test_gradients_are_cleared() -> None:
    """By hand, or by the optimizer's own zero_grad if it overrides it."""
    model = nn.Linear(2, 2)
    for optimizer in (SGD(model.parameters(), lr=0.1), Noted(model.parameters(), lr=0.1)):
        model(torch.ones(1, 2)).sum().backward()
        clear_gradients([optimizer])
        assert model.weight.grad is None
        assert model.bias.grad is None
    assert optimizer.calls == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_a_script_is_left_alone_but_for_what_the_fused_one_needs(
    kind: type[Optimizer],
) -> None:
    """The groups are the script's own objects, and may be fewer than those that have a state; float32
    averages of bfloat16 weights stay so.
    """
    weights = [nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = kind([{"params": [weight]} for weight in weights], lr=0.1, **momentum(kind))
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    name = "momentum_buffer" if kind is SGD else "exp_avg"
    for state in optimizer.state.values():
        state[name] = state[name].float()
    first = optimizer.param_groups[0]
    del optimizer.param_groups[1]
    use_fused([optimizer])
    assert optimizer.param_groups[0] is first
    assert {state[name].dtype for state in optimizer.state.values()} == {torch.float32}
    if kind is not SGD:
        assert optimizer.state[weights[0]]["step"].dtype == torch.float32
