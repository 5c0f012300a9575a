"""Writing beside training: a checkpoint holds the state of its step,
and only the next save waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.late_device import LateDevice, late_device
from tests.helpers.toy import Line, Net, loader, quiet
from trainkit.api.callback import Callback
from trainkit.api.view import RunView
from trainkit.callbacks import EMA, ModelCheckpoint
from trainkit.checkpoint import format as ckpt
from trainkit.checkpoint.store import LocalStore, Take, nothing_left
from trainkit.checkpoint.writer import HostCopy, Writer
from trainkit.errors import CheckpointError
from trainkit.optim.optimizer_state import in_order

PATIENCE_S = 20


class HeldStore(LocalStore):
    """Begins to write when it is let."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun, self.let = threading.Event(), threading.Event()

    def write(self, name: str, snapshot: ckpt.Snapshot, take: Take = nothing_left) -> None:
        """Wait, and write."""
        self.begun.set()
        assert self.let.wait(PATIENCE_S)
        self.taken = snapshot
        super().write(name, snapshot)


class HeldKeeper(ModelCheckpoint):
    """Saves only after the second step, into a blocked store."""

    def __init__(self) -> None:
        super().__init__(every_n_epochs=0, save_last=False)
        self.expected: dict[str, Any] = {}

    def setup(self, trainer: RunView, task: Any, stage: str) -> None:
        """Take the store that waits."""
        super().setup(trainer, task, stage)
        self.store: HeldStore = HeldStore(trainer.run_dir / "checkpoints")

    def on_train_step_end(self, trainer: RunView, task: Any) -> None:
        """Save, and continue training while the writer waits."""
        if trainer.global_step == 2:
            self.save(trainer)

    def on_save_checkpoint(self, trainer: RunView, task: Any, checkpoint: dict[str, Any]) -> None:
        """Record the state: after the other callbacks, which put averages in the weights' place."""
        self.expected = {name: tensor.clone() for name, tensor in task.state_dict().items()}
        self.optimizer = deepcopy(trainer.optimizers[0].state_dict())
        self.others = {
            type(c).__name__: deepcopy(c.state_dict()) for c in trainer.callbacks if c is not self
        }


class LetsGo(Callback):
    """Lets the writer write in the last of five steps."""

    runs_last = True

    def __init__(self, keeper: HeldKeeper) -> None:
        self.keeper, self.seen = keeper, []

    def on_train_step_end(self, trainer: RunView, task: Any) -> None:
        """Note that the loop has come this far, and that nothing is written."""
        self.seen.append((trainer.global_step, self.keeper.store.names()))
        if trainer.global_step == 5:
            assert self.keeper.store.begun.wait(PATIENCE_S)
            self.keeper.store.let.set()


def same(one: Any, other: Any) -> bool:
    """Whether trees of tensors and plain values are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        if one.layout is not torch.strided:
            one, other = one.coalesce().to_dense(), other.coalesce().to_dense()
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(value, other[key]) for key, value in one.items()
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def held_back(run_dir: Path, task: Any, *callbacks: Callback) -> tuple[HeldKeeper, LetsGo, Path]:
    """Train five steps, of which the second is saved while the writer waits for the fifth."""
    keeper = HeldKeeper()
    lets = LetsGo(keeper)
    quiet(run_dir, max_steps=5, callbacks=[*callbacks, keeper, lets]).fit(task, loader(24))
    return keeper, lets, run_dir / "checkpoints" / "epoch=0-step=2"


def test_training_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    """Steps continue while a checkpoint is being written, and the fit ends when it is written."""
    _, lets, folder = held_back(tmp_path, Net())
    assert lets.seen == [(step, []) for step in range(1, 6)]
    assert ckpt.verify(folder)["global_step"] == 2


class Shapes(Line):
    """A convolution, a number without dimensions, and a tensor that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.number = nn.Parameter(torch.tensor(0.5))
        self.twin = self.model
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use all of it."""
        self.calls += 1
        return (
            self.twin(x) * self.number + self.conv(x[:, :, None, None].expand(-1, 3, 4, 4)).mean()
        )

    def configure_optimizers(self) -> Any:
        """Adam, which has steps without dimensions and moments in the weights' memory format."""
        return torch.optim.Adam(self.parameters(), lr=0.1)


@pytest.mark.parametrize("channels_last", [False, True])
def test_what_is_written_is_the_state_of_its_step(tmp_path: Path, channels_last: bool) -> None:
    """Weights, optimizer state and averages are those of the saved step,
    although training continued.
    """
    task, ema, keeper = Shapes(), EMA(decay=0.5), HeldKeeper()
    if channels_last:
        task.conv.to(memory_format=torch.channels_last)
    trainer = quiet(
        tmp_path, max_steps=5, callbacks=[ema, keeper, LetsGo(keeper)], channels_last=channels_last
    )
    trainer.fit(task, loader(24))
    folder = tmp_path / "checkpoints" / "epoch=0-step=2"
    training = ckpt.load_training(folder)
    assert same(ckpt.read_state(folder), keeper.expected)
    assert same(in_order(training["optimizers"][0], []), keeper.optimizer)
    assert same(training["callbacks"]["EMA.0"], keeper.others["EMA"])
    assert not same(keeper.expected, task.state_dict())
    assert int(keeper.expected["calls"]) == 2


class Table(Line):
    """A sparse embedding under SGD with momentum: the optimizer's state is sparse."""

    def make_model(self) -> nn.Module:
        """Return the table."""
        return nn.Embedding(6, 1, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Look rows up by the first number."""
        return self.model((x[:, 0].abs() * 2).long().clamp(max=5))


def test_a_sparse_state_is_that_of_its_step(tmp_path: Path) -> None:
    """A sparse momentum is copied too, and is written as it was."""
    keeper, _, _ = held_back(tmp_path, Table(momentum=0.9))
    assert keeper.store.taken.training is not None
    kept = keeper.store.taken.training["optimizers"][0]
    assert kept["state"][0]["momentum_buffer"].is_sparse
    assert same(in_order(kept, []), keeper.optimizer)


def test_a_sparse_copy_has_memory_of_its_own() -> None:
    """A later write to a sparse tensor does not change its copy."""
    tensor = torch.sparse_coo_tensor([[1]], [[2.0]], (3, 1), check_invariants=True).coalesce()
    copy = HostCopy().take({"x": tensor})["x"]
    tensor.values().zero_()
    assert copy.to_dense().tolist() == [[0.0], [2.0], [0.0]]


def test_tied_tensors_stay_tied_on_the_host(tmp_path: Path) -> None:
    """A tensor with two names is copied and written once, and read under both."""
    keeper, _, folder = held_back(tmp_path, Shapes())
    (size,) = [
        about["bytes"]
        for name, about in ckpt.verify(folder)["files"].items()
        if name == ckpt.WEIGHTS
    ]
    assert {"model.weight", "twin.weight"} < ckpt.read_state(folder).keys()
    once = sum(t.nbytes for n, t in keeper.expected.items() if not n.startswith("twin."))
    assert size - once == pytest.approx(800, abs=700)  # names and shapes
    state = {"a": torch.ones(2000), "c": torch.zeros(0)}
    snapshot = Writer().snapshot(state | {"b": state["a"]}, None, {})
    assert (set(snapshot.weights), dict(snapshot.aliases)) == ({"a", "c"}, {"b": "a"})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(3),
        torch.zeros(0, 4),
        torch.randn(4, 4)[:, ::2],
        torch.ones(1, 3).expand(5, 3),
        torch.randn(3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
    ],
    ids=[
        "plain",
        "transposed",
        "channels last",
        "0-dim",
        "empty",
        "strided",
        "expanded",
        "bfloat16",
        "bool",
        "complex",
    ],
)
def test_a_host_copy_holds_what_it_was_given(tensor: torch.Tensor) -> None:
    """Of any layout and type, the copy is equal, has memory of its own,
    and takes the next copy into the same memory.
    """
    host = HostCopy()
    copy = host.take({"x": tensor})["x"]
    assert same(copy, tensor)
    assert (
        copy.numel() == 0
        or copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    )
    other = tensor.clone().zero_() if tensor.stride() != copy.stride() else torch.zeros_like(tensor)
    place = copy.data_ptr()
    again = host.take({"x": other})["x"]
    assert same(again, other)
    if other.stride() == copy.stride():
        assert again.data_ptr() == place


def test_memory_is_used_again_by_place() -> None:
    """Each place in the tree has its own memory, in each save the same;
    another shape takes another.
    """
    host, model = HostCopy(), Net()
    tree = {"weights": model.state_dict(), "list": [torch.zeros(2), torch.ones(2)]}

    def places(tree: Any) -> list[int]:
        return [
            *(t.data_ptr() for t in tree["weights"].values()),
            *(t.data_ptr() for t in tree["list"]),
        ]

    first = places(host.take(tree))
    assert len(set(first)) == len(first)
    assert places(host.take(tree)) == first
    assert host.take(tree | {"list": [torch.zeros(3)]})["list"][0].tolist() == [0, 0, 0]


def test_plain_values_and_kinds_of_containers_stay() -> None:
    """Dicts, lists, tuples and sets keep their types when copied; plain values are the values."""
    tree = {"a": [1, ("b", 2.5, None)], "c": {3, 4}, "d": {5: torch.ones(())}}
    copy = HostCopy().take(tree)
    assert same(copy, tree)
    assert type(copy["a"][1]) is tuple
    copy["a"].append(1)
    assert len(tree["a"]) == 2


@pytest.mark.parametrize("seed", [None, *range(4)])
def test_an_accelerators_state_is_copied_when_the_stream_gets_there(
    writer: Writer, seed: int | None
) -> None:
    """A step does not wait for the copy: the thread that writes does. The next update, queued
    behind it, is not in it; the next save uses the memory again, one block for all tensors.
    """
    written: list[dict[str, list[float]]] = []
    with late_device(seed) as device:
        weights = {"a": torch.zeros(3, device=device), "b": torch.ones(2, device=device)}
        for step in range(3):
            for weight in weights.values():
                weight += 1
            snapshot = writer.snapshot(weights, {"on_host": torch.full((1,), float(step))}, {})
            assert seed is not None or snapshot.weights["a"].isnan().all() or step > 0

            def write(snapshot: Any = snapshot) -> None:
                tensors = snapshot.weights | snapshot.training
                written.append({name: tensor.tolist() for name, tensor in tensors.items()})

            writer.start(write)
        writer.wait()
        assert LateDevice.active is not None and len(LateDevice.active.pinned) == 1
    assert written == [
        {"a": [n] * 3, "b": [n + 1] * 2, "on_host": [n - 1]} for n in (1.0, 2.0, 3.0)
    ]


@pytest.fixture
def writer() -> Iterator[Writer]:
    """A writer; its thread ends with the test."""
    made = Writer()
    yield made
    made.wait()


def test_the_next_save_waits_for_the_last(writer: Writer) -> None:
    """A second snapshot is taken when the first is written:
    its memory is not written over before.
    """
    let, order = threading.Event(), []

    def write() -> None:
        let.wait(PATIENCE_S)
        order.append("written")

    writer.start(write)
    timer = threading.Timer(0.05, let.set)
    timer.start()
    writer.snapshot({"a": torch.ones(2)}, None, {})
    order.append("copied")
    timer.join()
    assert order == ["written", "copied"]


@pytest.mark.parametrize("next_call", ["wait", "start", "snapshot"])
def test_an_unexpected_error_comes_out_of_the_next_call(next_call: str) -> None:
    """The caller's next call raises an unexpected error of the writing thread, once."""
    writer = Writer()

    def fail() -> None:
        raise ValueError("a bug")

    writer.start(fail)
    arguments = {"wait": (), "start": (lambda: None,), "snapshot": ({}, None, {})}
    with pytest.raises(ValueError, match="a bug"):
        getattr(writer, next_call)(*arguments[next_call])
    writer.wait()


@pytest.mark.parametrize(
    ("error", "said", "advice"),
    [
        (ValueError("a strange tensor"), "ValueError: a strange tensor", "$"),  # room does not help
        (OSError("No space left"), "No space left", " Make room there, or "),
    ],
)
def test_an_unexpected_error_costs_that_checkpoint_alone(
    error: Exception,
    said: str,
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Any error of writing is reported with its type, and the run continues to its end; one that
    could write no checkpoint at all ends as failed.
    """

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("trainkit.checkpoint.store.write", fail)
    trainer = quiet(tmp_path, max_steps=2, enable_checkpointing=True)
    with pytest.raises(
        CheckpointError,
        match=rf"not one checkpoint of it could be written.*: {said}\.{advice}",
    ):
        trainer.fit(Line(), loader(8))
    assert trainer.global_step == 2
    assert f"was NOT written: {said}. Older ones are left." in capsys.readouterr().out
    assert not any(thread.name == "trainkit-checkpoint" for thread in threading.enumerate())
