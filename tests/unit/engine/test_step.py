"""The step of an engine: reduce -> unscale -> correct -> clip, then update and clear."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.threads import ThreadEngine, World
from trainkit.device.precision import Precision, PrecisionName
from trainkit.engine.single import SingleEngine
from trainkit.errors import TaskError


def line() -> nn.Linear:
    """Two weights, all zero, without bias."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def sgd(*parameters: Any, lr: float = 1.0) -> torch.optim.SGD:
    """Plain SGD: an update is the gradient."""
    return torch.optim.SGD(parameters, lr=lr)


def prepared(
    *gradient: float, precision: PrecisionName = "32-true"
) -> tuple[SingleEngine, nn.Linear, Precision]:
    """A single engine and its model, which has this gradient times the loss scale."""
    engine, model, numbers = SingleEngine("cpu"), line(), Precision(precision, torch.device("cpu"))
    engine.prepare(model, [sgd(model.weight)], numbers)
    engine.backward(numbers.scale((model.weight * torch.tensor([gradient])).sum()))
    return engine, model, numbers


def seen_by(model: nn.Linear, seen: list[Any], factor: float | None = None) -> Any:
    """A correction that records the gradient at its call."""

    def correction() -> Tensor | None:
        assert model.weight.grad is not None
        seen.append(model.weight.grad.tolist()[0])
        return None if factor is None else torch.tensor(factor, dtype=torch.float64)

    return correction


def test_a_correction_gets_the_sum_over_ranks_and_is_applied_before_clipping() -> None:
    """Two ranks of (3, 0) and (0, 4):
    the correction sees (3, 4), and times 0.4 the norm of 2 is clipped to 1.
    """

    def work(engine: ThreadEngine) -> tuple[list[Any], list[float]]:
        with engine:
            model, seen = line(), []
            engine.prepare(model, [sgd(model.weight)])
            own = (
                torch.tensor([[3.0, 0.0]]) if engine.ranks.rank == 0 else torch.tensor([[0.0, 4.0]])
            )
            engine.backward((model.weight * own).sum())
            engine.finish_gradients(seen_by(model, seen, 0.4))
            engine.step(1.0)
            assert model.weight.grad is not None
            return seen, model.weight.grad.tolist()[0]

    for seen, gradient in World(2).run(work):
        assert seen == [[3.0, 4.0]]
        assert gradient == pytest.approx([0.6, 0.8])


def test_reduced_gradients_are_not_summed_again() -> None:
    """After `reduce_gradients`, `reduced=True` keeps the sum: 2 ranks of 1 give 2, not 4."""

    def work(engine: ThreadEngine) -> list[float]:
        with engine:
            model = line()
            engine.prepare(model, [sgd(model.weight)])
            engine.backward(model.weight.sum())
            engine.reduce_gradients()
            engine.finish_gradients(reduced=True)
            assert model.weight.grad is not None
            return model.weight.grad.tolist()[0]

    assert World(2).run(work) == [[2.0, 2.0]] * 2


def test_the_loss_scale_is_taken_out_before_the_correction() -> None:
    """fp16: a correction sees the gradient of the loss, not of the scaled loss,
    and clipping acts on it.
    """
    engine, model, numbers = prepared(3.0, 4.0, precision="16-mixed")
    assert numbers.scaler.get_scale() > 1
    seen: list[Any] = []
    engine.finish_gradients(seen_by(model, seen))
    engine.step(2.5)
    assert seen == [[3.0, 4.0]]
    assert model.weight.grad is not None
    assert model.weight.grad.tolist()[0] == pytest.approx([1.5, 2.0])


def test_without_factor_and_limit_gradients_keep_their_bits() -> None:
    """A correction of None multiplies nothing, and no limit clips nothing:
    inf stays inf, and is no nan.
    """
    engine, model, _ = prepared(1e30, float("inf"))
    engine.finish_gradients()
    engine.step(None)
    assert model.weight.grad is not None
    assert model.weight.grad.equal(torch.tensor([[1e30, float("inf")]]))


def test_elements_are_clipped_by_value() -> None:
    """The algorithm "value" limits each element by itself."""
    engine, model, _ = prepared(3.0, -0.25)
    engine.finish_gradients()
    engine.step(0.5, "value")
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[0.5, -0.25]]


def test_a_parameter_of_two_optimizers_is_corrected_once() -> None:
    """Shared by two optimizers, a gradient of 1 becomes 0.5, not 0.25."""
    engine, model = SingleEngine("cpu"), line()
    engine.prepare(model, [sgd(model.weight), sgd(model.weight)])
    engine.backward(model.weight.sum())
    engine.finish_gradients(lambda: torch.tensor(0.5))
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[0.5, 0.5]]


def test_a_factor_is_rounded_to_the_gradients_dtype() -> None:
    """3 x 0.3 in bfloat16 is that of a factor in bfloat16 (0.30078),
    and the gradient stays bfloat16.
    """
    engine, model = SingleEngine("cpu"), line().bfloat16()
    engine.prepare(model, [sgd(model.weight)])
    engine.backward(3 * model.weight.sum())
    engine.finish_gradients(lambda: torch.tensor(0.3, dtype=torch.float64))
    assert model.weight.grad is not None
    assert model.weight.grad.equal(torch.full((1, 2), 0.90234375, dtype=torch.bfloat16))


@pytest.mark.parametrize("precision", [None, "32-true", "16-mixed"])
def test_a_step_updates_and_gradients_stay_until_they_are_cleared(
    precision: PrecisionName | None,
) -> None:
    """With a precision or without, the weights move by the gradient,
    which a hook may still read.
    """
    engine, model, numbers = prepared(3.0, 4.0, precision=precision or "32-true")
    if precision is None:
        engine._precision = None
    engine.finish_gradients()
    assert engine.step() is True
    assert model.weight.tolist() == [[-3.0, -4.0]]
    assert model.weight.grad is not None
    engine.clear_gradients()
    assert model.weight.grad is None


def test_an_overflow_on_one_rank_holds_back_all() -> None:
    """fp16: all ranks skip the update, and the result is False."""

    def work(engine: ThreadEngine) -> tuple[bool, list[float]]:
        with engine:
            model, numbers = line(), Precision("16-mixed", engine.device)
            engine.prepare(model, [sgd(model.weight)], numbers)
            slope = float("inf") if engine.ranks.rank == 1 else 1.0
            engine.backward(numbers.scale((model.weight * slope + model.weight).sum()))
            engine.finish_gradients()
            return engine.step(), model.weight.tolist()[0]

    assert World(2).run(work) == [(False, [0.0, 0.0])] * 2


def test_a_gradient_of_no_optimizer_is_cleared_too() -> None:
    """A parameter that no optimizer updates would sum its gradient again in each step."""
    engine, model = SingleEngine("cpu"), nn.ModuleList([line(), line()])
    engine.prepare(model, [sgd(model[0].weight)])
    engine.backward(model[0].weight.sum() + model[1].weight.sum())
    engine.finish_gradients()
    engine.step()
    engine.clear_gradients()
    assert model[1].weight.grad is None
    assert model[1].weight.tolist() == [[0.0, 0.0]]


def test_the_states_are_those_of_the_task_and_the_optimizers() -> None:
    """Weights and buffers by name, sharing memory; the state_dict of each optimizer, in order."""
    engine, model = SingleEngine("cpu"), nn.BatchNorm1d(2)
    optimizers = [
        torch.optim.SGD([model.weight], lr=0.5, momentum=0.9),
        torch.optim.SGD([model.bias], lr=0.25),
    ]
    engine.prepare(model, optimizers)
    state = engine.model_state(model)
    assert list(state) == list(model.state_dict())
    assert state["running_mean"].data_ptr() == model.running_mean.data_ptr()  # type: ignore[union-attr]
    assert [held["param_groups"][0]["lr"] for held in engine.optimizer_state(optimizers)] == [
        0.5,
        0.25,
    ]


def test_a_state_that_is_no_tensor_is_refused() -> None:
    """A checkpoint's weights are tensors only: an extra state of another kind is named."""

    class Counting(nn.Module):
        def get_extra_state(self) -> int:
            return 3

    engine = SingleEngine("cpu")
    with pytest.raises(
        TaskError, match=r"state_dict\(\)\['0\._extra_state'\] is a int; weights are tensors"
    ):
        engine.model_state(nn.Sequential(Counting()))


def test_a_released_engine_holds_no_task() -> None:
    """After `release` the model's memory is free for the next session of the same engine."""
    engine, model = SingleEngine("cpu"), line()
    engine.prepare(model, [sgd(model.weight)])
    held = weakref.ref(model)
    del model
    assert held() is not None
    engine.release()
    assert held() is None


def test_replicas_stay_whole() -> None:
    """`shard` leaves a task as it is if each rank holds all of it."""
    engine, model = SingleEngine("cpu"), line()
    before = dict(model.named_parameters())
    engine.shard(model)
    assert all(after is before[name] for name, after in model.named_parameters())
