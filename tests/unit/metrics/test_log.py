"""Values of `log`: exact over uneven batches and ranks; names, reductions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.toy import Line, loader, quiet
from trainkit.errors import TaskError
from trainkit.metrics.log import Accumulator, MetricLog, combine, read_all


def alone(value: Any) -> list[Any]:
    """Gather over a single rank."""
    return [value]


def log(*values: tuple[float | torch.Tensor, float], **options: Any) -> MetricLog:
    """Return a table that holds values of "m", each with its weight."""
    table = MetricLog()
    for value, weight in values:
        table.add("m", value, weight=weight, **({"on_step": False, "on_epoch": True} | options))
    return table


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_means_are_weighted_by_samples(kind: Any) -> None:
    """The epoch's mean is that over all samples, however unevenly they are batched."""
    table = log((kind(1.0), 4), (kind(2.0), 4), (kind(5.0), 1))
    assert table.epoch_values(alone) == {"m": pytest.approx(17 / 9, rel=1e-15)}


@pytest.mark.parametrize("reduction", ["mean", "sum", "min", "max"])
@given(
    st.lists(
        st.tuples(st.floats(-1e3, 1e3, width=32), st.integers(1, 9)), min_size=1, max_size=200
    ),
    st.integers(1, 4),
    st.booleans(),
)
def test_any_split_over_ranks_gives_the_same_value(
    reduction: Any, pairs: list[tuple[float, int]], ranks: int, as_tensor: bool
) -> None:
    """Folding after many values and gathering over ranks change nothing, for each reduction."""
    held = [Accumulator(reduction) for _ in range(ranks)]
    for i, (value, weight) in enumerate(pairs):
        held[i % ranks].add(torch.tensor(value) if as_tensor else value, weight)
    values, weights = [v for v, _ in pairs], [w for _, w in pairs]
    mean = math.fsum(v * w for v, w in pairs) / sum(weights)
    expected = {"mean": mean, "sum": math.fsum(values), "min": min(values), "max": max(values)}[
        reduction
    ]
    read = list(read_all({str(i): one for i, one in enumerate(held) if i < len(pairs)}).values())
    assert combine(read) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_memory_stays_flat() -> None:
    """After thousands of values an accumulator holds a few dozen tensors at most."""
    held = Accumulator("mean")
    for i in range(2000):
        held.add(torch.tensor(1.0), weight=1 + i % 3)
        held.add(1.0, weight=1)
    assert len(held._parts) + sum(len(v) for v in held._pending.values()) + len(held._numbers) < 200
    assert combine([read_all({"": held})[""]]) == pytest.approx(1.0, rel=1e-15)


def test_ranks_without_a_value_take_no_part() -> None:
    """A value logged by one rank is that rank's; the names of all ranks are merged."""

    def gather(own: Any) -> list[Any]:
        return [own, ({}, False), ({"other": ("mean", 6.0, 3.0)}, False)]

    assert log((2.0, 4)).epoch_values(gather) == {"m": 2.0, "other": 2.0}


def test_names_on_step_and_epoch() -> None:
    """A value logged for both gets the suffixes _step and _epoch;
    for one alone it keeps its name.
    """
    both = log((1.0, 1), on_step=True, on_epoch=True, prog_bar=True)
    assert both.step_values() == {"m_step": 1.0}
    assert both.prog_bar == {"m_step", "m_epoch"}
    assert both.epoch_values(alone) == {"m_epoch": 1.0}
    assert log((1.0, 1), on_step=True, on_epoch=False).step_values() == {"m": 1.0}


def test_several_loaders_have_names_of_their_own() -> None:
    """The suffix of a loader goes behind the whole name."""
    table = MetricLog("/dataloader_idx_1")
    table.add("m", 1.0, weight=1, on_step=True, on_epoch=True)
    assert table.epoch_values(alone) == {"m_epoch/dataloader_idx_1": 1.0}


def test_a_new_step_forgets_the_last() -> None:
    """Step values are of the step only, over its microbatches; epoch values accumulate."""
    table = log((1.0, 1), on_step=True)
    table.new_step()
    table.add("m", 2.0, weight=1, on_step=True, on_epoch=True)
    table.add("m", 5.0, weight=2, on_step=True, on_epoch=True)
    assert table.step_values() == {"m_step": 4.0}
    assert table.epoch_values(alone) == {"m_epoch": 13 / 4}


def test_an_epoch_is_read_once() -> None:
    """Reading the epoch's values resets them."""
    table = log((1.0, 1))
    assert table.epoch_values(alone) == {"m": 1.0}
    assert table.epoch_values(alone) == {}


def test_a_logged_tensor_is_a_copy_without_graph() -> None:
    """Writing to a tensor after logging it does not change the log,
    and the log does not keep its graph alive.
    """
    value = torch.tensor([1.0], requires_grad=True) * 1
    table = log((value, 1))
    with torch.no_grad():
        value += 5
    assert not any(
        v.requires_grad
        for held in table._epoch.values()
        for vs in held._pending.values()
        for v in vs
    )
    assert table.epoch_values(alone) == {"m": 1.0}


def test_halves_are_summed_in_double() -> None:
    """Values of half precision lose nothing in the sum of a long epoch."""
    table = log(*[(torch.tensor(0.1, dtype=torch.bfloat16), 1)] * 5000, reduction="sum")
    assert table.epoch_values(alone)["m"] == pytest.approx(
        5000 * float(torch.tensor(0.1, dtype=torch.bfloat16))
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2000), r"tensor of shape \[2000\]; a logged value is"),
        ("0.5", "got a str"),
        (None, "got a NoneType"),
    ],
)
def test_only_one_number_can_be_logged(value: Any, words: str) -> None:
    """A value that is not one number is refused by name."""
    with pytest.raises(
        TaskError, match=rf"log\('m', \.\.\.\) got a {words.removeprefix('got a ')}"
    ):
        log((value, 1))


def test_a_name_keeps_its_reduction() -> None:
    """One name cannot be a mean here and a sum there."""
    table = log((1.0, 1))
    with pytest.raises(TaskError, match=r"log\('m', \.\.\.\).*'sum'.*'mean'"):
        table.add("m", 1.0, weight=1, on_step=False, on_epoch=True, reduction="sum")


def test_an_unknown_reduction_is_refused() -> None:
    """A reduction that does not exist is refused, with those that do."""
    with pytest.raises(
        TaskError, match=r"reduce_fx is 'median'; it must be one of 'mean', 'sum', 'min', 'max'"
    ):
        log((1.0, 1), reduction="median")


def test_values_of_an_unread_step_are_not_collected() -> None:
    """Between two logs a step value costs nothing; an epoch's value is collected in each step;
    errors are raised in each.
    """
    log = MetricLog()
    log.new_step(is_read=False)
    log.add("step", torch.tensor(1.0), weight=1, on_step=True, on_epoch=False)
    log.add("both", torch.tensor(2.0), weight=1, on_step=True, on_epoch=True)
    assert log.step_values() == {}
    with pytest.raises(TaskError, match="a logged value is a number"):
        log.add("step", torch.zeros(2000), weight=1, on_step=True, on_epoch=False)
    log.new_step(is_read=True)
    log.add("step", torch.tensor(3.0), weight=1, on_step=True, on_epoch=False)
    log.add("both", torch.tensor(4.0), weight=1, on_step=True, on_epoch=True)
    assert log.step_values() == {"step": 3.0, "both_step": 4.0}
    assert log.epoch_values(lambda own: [own]) == {"both_epoch": 3.0}


def test_all_values_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many values there are, a device is waited for once."""
    log, reads = MetricLog(), []
    for i in range(5):
        log.add(f"value {i}", torch.tensor(float(i)), weight=2, on_step=True, on_epoch=False)
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (reads.append(self), real(self))[1])
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("read alone"))
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: pytest.fail("read alone"))
    assert log.step_values() == {f"value {i}": float(i) for i in range(5)}
    assert len(reads) == 1


@pytest.mark.parametrize("reduction", ["min", "max", "sum", "mean"])
def test_nan_does_not_vanish(reduction: Any) -> None:
    """Wherever it comes among plain numbers, tensors and ranks;
    infinities that cancel out are NaN too.
    """
    for values in ([1.0, math.nan, 2.0], [math.nan, 1.0], [1.0, math.nan]):
        for kind in (float, torch.tensor):
            held = Accumulator(reduction)
            for value in values:
                held.add(kind(value), 1.0)
            assert math.isnan(combine([read_all({"": held})[""]]))
        assert math.isnan(combine([(reduction, value, 1.0) for value in values]))
    if reduction in ("sum", "mean"):
        assert math.isnan(combine([(reduction, value, 1.0) for value in (math.inf, -math.inf)]))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("sync_dist_group", "leave it out: an epoch's value is always"),
        ("on_epochs", "Did you mean 'on_epoch'?"),
    ],
)
def test_what_log_does_not_take_is_refused(tmp_path: Path, option: str, words: str) -> None:
    """Lightning's arguments with what to do, others with what there is."""

    class Other(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", 1.0, **{option: True})

    with pytest.raises(TaskError, match=rf"log\('loss', \.\.\.\): {option}.*") as raised:
        quiet(tmp_path).fit(Other(), loader(8))
    assert words in str(raised.value)
