"""WeightAverage: its arithmetic, which tensors it is of, and the exchange with the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainkit.device.sync_guard import SyncGuard
from trainkit.errors import CheckpointError
from trainkit.extensions.swa.averaging import WeightAverage


def set_to(model: nn.Module, value: float) -> None:
    """Fill all parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_an_exponential_average() -> None:
    """The first update copies; each later one weighs the average by `decay`."""
    line = nn.Linear(1, 1).double()
    average = WeightAverage(line, buffers=False)
    expected = 3.0
    for i, value in enumerate([3.0, 5.0, -1.0, 0.5]):
        set_to(line, value)
        average.update(0.75)
        expected = 0.75 * expected + 0.25 * value if i else value
    average.show()
    assert line.weight.item() == pytest.approx(expected, rel=1e-15)


def test_an_equal_average() -> None:
    """Without a decay all updates count the same."""
    line = nn.Linear(1, 1).double()
    average = WeightAverage(line, buffers=False)
    for value in (3.0, 5.0, -1.0, 0.5):
        set_to(line, value)
        average.update(None)
    average.show()
    assert line.bias.item() == pytest.approx(7.5 / 4, rel=1e-15)


def test_showing_and_hiding_change_no_bit() -> None:
    """The trained weights return unchanged, in the same tensors; buffers too."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    average = WeightAverage(model, buffers=True)
    average.update(0.9)
    model(torch.randn(4, 2))
    set_to(model, 7.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pointers = [p.data_ptr() for p in model.parameters()]
    average.show()
    average.show()
    assert average.shown
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    average.hide()
    average.hide()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == pointers


def test_counters_and_masks_stay_the_models_own() -> None:
    """A counter is not averaged, and a mask's infinities do not become NaN."""
    model = nn.BatchNorm1d(2)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    average = WeightAverage(model, buffers=True)
    for _ in range(3):
        average.update(0.5)
        model(torch.randn(4, 2))
    average.show()
    assert model.mask.tolist() == [0.0, -torch.inf]
    assert model.num_batches_tracked.item() == 3


def test_a_small_change_is_not_lost_in_bfloat16() -> None:
    """The average of bfloat16 weights is float32, also over a checkpoint that shows it."""
    line = nn.Linear(1, 1).bfloat16()
    average = WeightAverage(line, buffers=False)
    set_to(line, 1.0)
    average.update(0.999)
    set_to(line, 2.0)
    for _ in range(3):
        average.update(0.999)
    average.show()
    assert line.weight.item() == 1.0  # 1.003 in bfloat16
    state = average.state_dict()
    other = WeightAverage(line, buffers=False)
    other.load_state_dict(state)
    assert line.weight.item() == 2.0
    assert other._average["weight"].item() == pytest.approx(2 - 0.999**3)


@pytest.mark.parametrize("decay", [0.9, None])
def test_an_update_reads_nothing_off_the_device(decay: float | None) -> None:
    """Taking weights in is all tensors, the first time too."""
    average = WeightAverage(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), buffers=True)
    with SyncGuard(torch.device("cpu")):
        for _ in range(3):
            average.update(decay)


@pytest.mark.parametrize("shown", [False, True])
def test_a_state_comes_back(shown: bool) -> None:
    """With the model as it was saved, weights and average are both found again,
    whichever the model held.
    """
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    average = WeightAverage(model, buffers=False)
    average.update(None)
    set_to(model, 4.0)
    average.update(None)
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if shown:
        average.show()
    state = average.state_dict()
    copy = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    copy.load_state_dict(model.state_dict())
    other = WeightAverage(copy, buffers=False)
    other.load_state_dict(state)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in copy.state_dict().items())
    set_to(copy, 1.0)
    other.update(None)
    average.hide()
    set_to(model, 1.0)
    average.update(None)
    for one in (average, other):
        one.show()
    assert torch.equal(copy[0].weight, model[0].weight)


def test_another_models_state_is_refused() -> None:
    """State that does not fit is refused."""
    average = WeightAverage(nn.Linear(2, 2), buffers=False)
    with pytest.raises(CheckpointError, match="averaged weights are of another model"):
        WeightAverage(nn.Linear(2, 2, bias=False), buffers=False).load_state_dict(
            average.state_dict()
        )
