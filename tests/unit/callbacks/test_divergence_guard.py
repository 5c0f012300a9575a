"""DivergenceGuard: hashes show every change; per-rank state is ignored.
Several ranks: tests/parallel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, Net, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import EMA, DivergenceGuard
from trainkit.callbacks.divergence_guard import _difference, _tensors, hash_of
from trainkit.errors import ConfigError, TrainkitError


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("count", [1, 3, 8, 37])
def test_a_hash_shows_every_change(dtype: torch.dtype, count: int) -> None:
    """A change of any one element, and a swap of two, change the hash;
    another layout of the same values does not.
    """
    values = (torch.arange(count) % 2 + torch.arange(count) // 3).to(dtype)
    seen = {tuple(hash_of(values).tolist())}
    for i in range(count):
        other = values.clone()
        other[i] = not values[i] if dtype == torch.bool else values[i] + 1
        seen.add(tuple(hash_of(other).tolist()))
        assert hash_of(values, is_quick=True).tolist() != hash_of(other, is_quick=True).tolist()
    assert len(seen) == count + 1
    wide = torch.stack([values, values], 1)
    assert torch.equal(hash_of(wide), hash_of(wide.t().contiguous().t()))


def test_swapped_words_show() -> None:
    """Two swapped elements change the hash."""
    first = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    assert not torch.equal(hash_of(first), hash_of(first[[1, 0, 2, 3]]))


@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, 3 * 4096 + 5])
def test_the_second_sum_is_weighted_by_place(count: int) -> None:
    """It is that of each word times 1, 3, 5, ..., modulo 2^64, however it is computed."""
    values = torch.randint(-(2**62), 2**62, (count,))
    places = torch.arange(1, 2 * count, 2)
    assert hash_of(values).tolist() == [int(values.sum()), int((values * places).sum())]


def test_a_view_into_a_buffer_is_hashed() -> None:
    """A tensor that starts between two words has the hash of its copy."""
    flat = torch.arange(9, dtype=torch.float32)
    assert torch.equal(hash_of(flat[1:7]), hash_of(flat[1:7].clone()))


def test_what_is_compared(tmp_path: Path) -> None:
    """Weights, buffers and optimizer state by name, without batch norm's per-rank statistics."""

    class Own(Net):
        def __init__(self) -> None:
            super().__init__(momentum=0.9)
            self.register_buffer("table", torch.zeros(2))

    run, task = quiet(tmp_path), Own()
    run.fit(task, loader(8))
    names = [name for name, _ in _tensors(task, run.run.optimizers)]
    assert "model.0.weight" in names
    assert "model.1.weight" in names
    assert "table" in names
    assert "model.0.weight's momentum_buffer in SGD" in names
    assert not any("running" in name or "num_batches" in name for name in names)
    bare: Any = nn.BatchNorm1d(3)
    assert [name for name, _ in _tensors(bare, [])] == ["weight", "bias"]


@pytest.mark.parametrize(
    ("hashes", "expected"),
    [
        ([1, 1, 1], None),
        ([1, 2], "'w' of rank 1"),
        ([2, 1, 1], "'w' of rank 0"),
        ([1, 2, 3, 1], "'w' of ranks 1, 2"),
        ([1, None], "'w' of rank 1"),
    ],
)
def test_the_odd_ranks_are_named(hashes: list[Any], expected: str | None) -> None:
    """Ranks that differ from the majority are named; from rank 0 if there is no majority."""
    assert _difference("w", hashes) == expected


def test_bad_arguments() -> None:
    """every_n_steps is at least 1, and there are three actions."""
    with pytest.raises(
        ConfigError,
        match=r"divergence_guard\.every_n_steps is 0; it must be a whole number, 1 or more",
    ):
        DivergenceGuard(every_n_steps=0)
    with pytest.raises(ConfigError, match=r"action is 'fix'; it must be one of 'stop', 'repair'"):
        DivergenceGuard(action="fix")  # type: ignore[arg-type]


class Drift(Callback):
    """Changes a weight on the second rank."""

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Once."""
        if trainer.global_step == 2 and trainer.global_rank == 1:
            with torch.no_grad():
                task.model.weight += 1


def test_a_repair_reaches_the_averages(tmp_path: Path) -> None:
    """What EMA averaged of a damaged rank is repaired with the weights:
    all ranks end with the same model.
    """

    def work(engine: ThreadEngine) -> torch.Tensor:
        callbacks = [Drift(), EMA(decay=0.5), DivergenceGuard(every_n_steps=1, action="repair")]
        task = Line()
        quiet(tmp_path, engine=engine, callbacks=callbacks).fit(task, loader(24))
        return weights(task)

    first, second = World(2).run(work)
    assert torch.equal(first, second)


def test_a_difference_is_reported_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a callback of one's own: once, at the next validation, and training continues."""

    def work(engine: ThreadEngine) -> tuple[int, list[DivergenceGuard]]:
        trainer = quiet(tmp_path, engine=engine, callbacks=[Drift()], max_epochs=3)
        trainer.fit(Line(), loader(24), loader(8))
        return trainer.global_step, [c for c in trainer.callbacks if isinstance(c, DivergenceGuard)]

    for steps, guards in World(2).run(work):
        assert steps == 9
        assert [(guard.every_n_steps, guard.action) for guard in guards] == [(None, "warn")]
    said = capsys.readouterr().out
    assert said.count("ranks no longer hold the same model: 'model.weight' of rank 1") == 1
    assert "At step 3" in said and "callbacks=divergence_guard stops such a run" in said


def test_equal_ranks_are_not_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default comparison says nothing of them; a guard of one's own takes its place."""
    own = DivergenceGuard(every_n_steps=5)
    World(2).run(
        lambda engine: quiet(tmp_path, engine=engine, max_epochs=2).fit(
            Line(), loader(24), loader(8)
        )
    )
    assert "same model" not in capsys.readouterr().out
    assert [
        c for c in quiet(tmp_path, callbacks=[own]).callbacks if isinstance(c, DivergenceGuard)
    ] == [own]


class Table(Line):
    """A sparse embedding under SGD with momentum, whose state is sparse too."""

    def make_model(self) -> nn.Module:
        """Return the table."""
        return nn.Embedding(6, 1, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Look rows up by the first number."""
        return self.model((x[:, 0].abs() * 2).long().clamp(max=5))


@pytest.mark.parametrize("action", ["stop", "repair"])
def test_sparse_state_is_compared_and_sent(tmp_path: Path, action: Any) -> None:
    """A sparse momentum is hashed, whatever the order of its rows, and can be sent."""
    table, merged, other = (
        torch.sparse_coo_tensor([at], [[value] for value in values], (5, 1), check_invariants=True)
        for at, values in (([3, 1, 3], [1.0, 2.0, 3.0]), ([1, 3], [2.0, 4.0]), ([1, 4], [2.0, 4.0]))
    )
    assert torch.equal(hash_of(table), hash_of(merged))
    assert not torch.equal(hash_of(table), hash_of(other))

    def work(engine: ThreadEngine) -> str | torch.Tensor:
        task = Table(momentum=0.9)
        callbacks = [Drift(), DivergenceGuard(every_n_steps=1, action=action)]
        try:
            quiet(tmp_path, engine=engine, callbacks=callbacks).fit(task, loader(24))
        except TrainkitError as error:
            return str(error)
        return weights(task)

    first, second = World(2).run(work)
    if action == "stop":
        assert "'model.weight' of rank 1" in str(first)
        assert first == second
    else:
        assert torch.equal(first, second)  # type: ignore[arg-type]
