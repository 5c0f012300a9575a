"""The bookkeeping of the reducer, with an engine that only records calls."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainkit.engine.heartbeat import Heartbeat
from trainkit.engine.reduce.buckets import split_frozen
from trainkit.engine.reduce.reducer import Bucket, GradientReducer
from trainkit.engine.sending import dense_view
from trainkit.errors import TaskError
from trainkit.extensions.insight.watchdog.stall_notes import Notes
from trainkit.extensions.insight.watchdog.watchdog import _Watch


class Noting(GradientReducer):
    """Sums with a second rank that had the same gradients, and notes the order of events."""

    def __init__(self, model: nn.Module, in_order: bool) -> None:
        trained, frozen = split_frozen(model.named_parameters())
        self.events: list[str] = []
        super().__init__([[named] for named in reversed(trained)], frozen, in_order)

    def _start(self, bucket: Bucket, flags: Tensor | None) -> Any:
        self.events.append(f"start {bucket.entries[0][0]}{' with flags' * (flags is not None)}")
        return bucket.index, flags

    def _end(self, bucket: Bucket) -> Tensor | None:
        self.events.append(f"end {bucket.entries[0][0]}")
        for _, parameter in bucket.entries:
            parameter.grad *= 2
        flags = bucket.handle[1]
        return None if flags is None else flags * 2

    def _wait(self, handle: Any) -> None:
        self.events.append("wait")

    def _start_rows(self, name: str, rows: Tensor, values: Tensor) -> Any:
        self.events.append(f"start rows {name}")
        return rows, values

    def _end_rows(self, handle: Any) -> tuple[Tensor, Tensor]:
        return torch.cat([handle[0]] * 2), torch.cat([handle[1]] * 2)

    def _start_flat(self, vector: Tensor, name: str) -> Any:
        return vector

    def _end_flat(self, handle: Any) -> Tensor:
        return handle.mul_(2)


def model() -> nn.Sequential:
    """Two layers without biases: parameters "0.weight" and "1.weight"."""
    return nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False))


@pytest.mark.parametrize("in_order", [True, False])
def test_sums_start_while_backward_runs(in_order: bool) -> None:
    """The last layer's sum starts first, before finish;
    the first layer's, which carries the flags, in it.
    """
    net = model()
    reducer = Noting(net, in_order)
    net(torch.ones(2, 3)).sum().backward()
    assert reducer.events == ["start 1.weight"]
    alone = net[0].weight.grad.clone()
    reducer.finish()
    assert reducer.events[1:] == ["start 0.weight with flags", "end 1.weight", "end 0.weight"]
    assert torch.equal(net[0].weight.grad, alone * 2)


def test_nothing_starts_under_no_sync() -> None:
    """Accumulated backwards keep their gradients until the last one;
    after it, the next step starts from zero.
    """
    net = model()
    reducer = Noting(net, in_order=True)
    for _ in range(2):
        with reducer.no_sync():
            net(torch.ones(2, 3)).sum().backward()
        assert not [event for event in reducer.events if event.startswith("start")]
        net(torch.ones(2, 3)).sum().backward()
        assert reducer.events == ["start 1.weight"]
        reducer.finish()
        reducer.events.clear()


def test_a_second_gradient_in_one_synchronised_step_is_an_error() -> None:
    """Two backwards outside no_sync would send a gradient that is not complete."""
    net = model()
    Noting(net, in_order=False)
    net(torch.ones(2, 3)).sum().backward()
    with pytest.raises(TaskError, match=r"'1\.weight' was computed twice.*self\.manual_backward"):
        net(torch.ones(2, 3)).sum().backward()


def test_a_rank_without_samples_takes_part_with_zeros() -> None:
    """finish without any backward starts every sum, in order;
    a parameter that no rank used has no gradient afterwards.
    """
    net = model()
    reducer = Noting(net, in_order=True)
    reducer.finish()
    assert reducer.events[:2] == ["start 1.weight", "start 0.weight with flags"]
    assert all(parameter.grad is None for parameter in net.parameters())


def test_removed_hooks_do_nothing() -> None:
    """After remove, backward no longer calls the reducer."""
    net = model()
    reducer = Noting(net, in_order=True)
    reducer.remove()
    net(torch.ones(2, 3)).sum().backward()
    assert reducer.events == []


@pytest.mark.parametrize(
    ("tensor", "has_view"),
    [
        (torch.randn(4, 3), True),
        (torch.randn(4, 3).t(), True),
        (torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), True),
        (torch.randn(2, 1, 1, 1).to(memory_format=torch.channels_last), True),
        (torch.tensor(3.0), True),
        (torch.randn(4, 6)[:, ::2], False),
        (torch.randn(3, 1).expand(3, 4), False),
    ],
)
def test_a_dense_tensor_has_a_flat_view(tensor: Tensor, has_view: bool) -> None:
    """Tensors that fill their memory can be sent without a copy;
    those with gaps or overlaps cannot.
    """
    view = dense_view(tensor)
    assert (view is not None) == has_view
    if view is not None:
        assert view.data_ptr() == tensor.data_ptr()
        assert sorted(view.tolist()) == sorted(tensor.reshape(-1).tolist())


def test_a_sparse_gradient_travels_as_rows_and_an_idle_one_as_none() -> None:
    """Rows of both ranks are added; a rank without a gradient sends no rows;
    a parameter that no rank used has none.
    """
    table, idle = nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2, sparse=True)
    net = nn.ModuleList([table, idle])

    class Sparse(Noting):
        def __init__(self) -> None:
            self.events = []
            named = list(net.named_parameters())
            GradientReducer.__init__(
                self, [[n] for n in named], [], in_order=True, sparse=set(net.parameters())
            )

    reducer = Sparse()
    table(torch.tensor([1, 3, 1])).sum().backward()
    reducer.finish()
    assert reducer.events == ["start rows 0.weight", "start rows 1.weight"]
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0, 4, 0, 2, 0]
    assert idle.weight.grad is None


class OnGpu(Tensor):
    """A tensor that says that it is on a GPU."""

    device = property(lambda self: torch.device("cuda", 0))


class Event:
    """An event of a pretended device."""

    done: bool | RuntimeError = False
    recorded = 0

    def record(self) -> None:
        """Count."""
        Event.recorded += 1

    def query(self) -> bool:
        """Return whether the device has come so far."""
        if isinstance(Event.done, RuntimeError):
            raise Event.done
        return Event.done


def test_a_device_without_its_sums_counts_as_waiting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a GPU the main thread runs ahead of the sums: a rank whose device waits for another one
    reports that to its watchdog, until the device has them or has failed.
    """
    monkeypatch.setattr(torch, "Event", Event)
    net = model()
    reducer = Noting(net, in_order=True)
    heartbeat = Heartbeat()
    heartbeat.reducer = reducer
    assert heartbeat.awaited == ""
    reducer._used = reducer._used.as_subclass(OnGpu)
    net(torch.ones(2, 3)).sum().backward()
    reducer.finish()
    assert (heartbeat.waiting, heartbeat.awaited) == ("", "the sums of gradients")
    engine: Any = SimpleNamespace(heartbeat=heartbeat, ranks=SimpleNamespace(rank=0, world_size=1))
    _Watch(engine, tmp_path, 1.0).note(2.0)
    notes, silent = Notes(tmp_path, 0, 1).read()
    assert notes[0].waiting == "the sums of gradients" and silent == {0: 0.0}
    for done in (True, RuntimeError("CUDA error")):
        monkeypatch.setattr(Event, "done", done)
        assert heartbeat.awaited == ""
    assert Event.recorded == 1


def test_on_the_cpu_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """There `finish` returns when the sums are there."""
    monkeypatch.setattr(torch, "Event", None)
    net = model()
    reducer = Noting(net, in_order=True)
    reducer.finish()
    assert not reducer.is_awaited()
