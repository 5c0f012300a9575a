"""Faults found in the second review, each with the claim that it broke."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, Net, compile_with, loader, quiet, rows, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import EMA, DivergenceGuard, ModelCheckpoint, StochasticWeightAveraging
from trainkit.callbacks.divergence_guard import hash_of
from trainkit.engine.sync_batchnorm import SyncBatchNorm
from trainkit.errors import ConfigError, TrainkitError
from trainkit.run.compile import _ALONE, compiled


def test_a_fit_after_a_prediction_trains(tmp_path: Path) -> None:
    """predict and validate restore each module's mode, also if they end with an error."""

    class Breaks(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise ValueError("broken")

    task = Breaks()
    task.model[3].eval()
    quiet(tmp_path).predict(task, loader(8))
    assert [task.training, task.model[1].training, task.model[3].training] == [True, True, False]
    with pytest.raises(ValueError, match="broken"):
        quiet(tmp_path).validate(task, loader(8))
    assert [task.training, task.model[1].training, task.model[3].training] == [True, True, False]


def test_batch_norm_is_plain_again_after_a_run(tmp_path: Path) -> None:
    """After a run with sync_batchnorm a forward on one rank alone ends, in training mode too."""

    def work(engine: ThreadEngine) -> list[bool]:
        task = Net()
        quiet(tmp_path, engine=engine, sync_batchnorm=True).fit(task, loader(24))
        task.train()
        if engine.place == 0:
            task(torch.randn(4, 3))  # the other end has gone
        return [isinstance(m, SyncBatchNorm) and m.link.all_reduce is not None for m in task.modules()]

    assert not any(sum(World(2).run(work), []))


class Drift(Callback):
    """Changes a weight on the second rank."""

    def on_train_step_end(self, trainer: Any, task: Any) -> None:
        """Once."""
        if trainer.global_step == 2 and trainer.global_rank == 1:
            with torch.no_grad():
                task.model.weight += 1


def test_a_repair_reaches_the_averages(tmp_path: Path) -> None:
    """EMA's averages of a damaged rank are repaired with the weights: all ranks end with the same model."""

    def work(engine: ThreadEngine) -> torch.Tensor:
        callbacks = [Drift(), EMA(decay=0.5), DivergenceGuard(every_n_steps=1, action="repair")]
        task = Line()
        quiet(tmp_path, engine=engine, callbacks=callbacks).fit(task, loader(24))
        return weights(task)

    first, second = World(2).run(work)
    assert torch.equal(first, second)


class Table(Line):
    """A sparse embedding under SGD with momentum: the optimizer's state is sparse too."""

    def make_model(self) -> nn.Module:
        """Return the table."""
        return nn.Embedding(6, 1, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Look rows up by the first number."""
        return self.model((x[:, 0].abs() * 2).long().clamp(max=5))


@pytest.mark.parametrize("action", ["stop", "repair"])
def test_sparse_state_is_compared_and_sent(tmp_path: Path, action: Any) -> None:
    """A sparse momentum is hashed independent of the order of its rows, and can be sent."""
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


def test_a_stream_with_another_accumulation_resumes_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the batches are of unknown size, microbatches are counted: none is left out."""
    x_NI, y_NO = rows(40).tensors
    seen: list[int] = []

    class Stream:
        def __iter__(self) -> Any:
            yield from ((x_NI[i : i + 2], y_NO[i : i + 2]) for i in range(0, 40, 2))

    class Keep(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(x_NI.tolist().index(batch[0][0].tolist()) // 2)
            return super().training_step(batch, batch_idx)

    quiet(tmp_path, max_steps=6, callbacks=ModelCheckpoint()).fit(Line(), Stream())
    quiet(tmp_path, accumulate_grad_batches=4).fit(Keep(), Stream(), ckpt_path="last")
    assert seen == list(range(4, 20))
    assert "step 1 of the epoch comes next, 2 microbatches of each rank of it for the second time" in capsys.readouterr().out


class Counts(Line):
    """Counts its samples by a metric object."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.counter, self.breaks = torchmetrics.SumMetric(), breaks

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Count."""
        self.counter.update(len(batch[0]))
        self.log("count", self.counter)
        if self.breaks and batch_idx == 2:
            raise ValueError("broken")
        return super().training_step(batch, batch_idx)


def test_metric_objects_are_reset_with_a_run(tmp_path: Path) -> None:
    """The counts of an interrupted run, or of SWA's pass over the data, are not part of the next run."""
    task = Counts(breaks=True)
    with pytest.raises(ValueError, match="broken"):
        quiet(tmp_path).fit(task, loader(24))
    task.breaks = False
    second = quiet(tmp_path)
    second.fit(task, loader(24))
    assert second.callback_metrics["count"] == 24

    class Normed(Counts):
        def make_model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    normed = Normed()
    swa = quiet(tmp_path, max_epochs=2, callbacks=StochasticWeightAveraging(0.1, swa_epoch_start=1))
    swa.fit(normed, loader(24))
    assert not normed.counter.update_called


def test_each_stretch_of_epochs_can_be_validated_in(tmp_path: Path) -> None:
    """If accumulation makes later epochs shorter than val_check_interval, the error names the epoch."""
    with pytest.raises(ConfigError, match=r"val_check_interval is 3, but epoch 1 has 2 steps"):
        quiet(tmp_path, max_epochs=2, accumulate_grad_batches={0: 1, 1: 4}, val_check_interval=3).fit(
            Line(), loader(24), loader(4)
        )


def test_watching_reads_and_compiling_are_two_runs(tmp_path: Path) -> None:
    """On the CPU one prevents the other, which is reported."""
    with pytest.raises(ConfigError, match=r"assert_no_sync and trainer\.compile are both set"):
        quiet(tmp_path, assert_no_sync=True, compile=True).fit(Line(), loader(4))


def test_modules_in_a_list_are_compiled() -> None:
    """A list or dict of modules is never called: its modules are compiled."""

    class Blocks(Line):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.ModuleDict({"a": nn.Linear(3, 3)})])

    task = Blocks()
    with compiled(task, True):
        on = [name for name, m in task.named_modules() if m._compiled_call_impl is not None]
    assert on == ["model", "blocks.0", "blocks.1.a"]
    assert all(m._compiled_call_impl is None for m in task.modules())


class Own(nn.Linear):
    """A layer of a user's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return twice the layer's output."""
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", [nn.Linear, Own])
def test_many_modules_are_all_compiled(kind: type[nn.Linear], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of modules that are compiled in place torch would leave all but eight as they are, or those of its own classes."""

    class Blocks(Line):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([kind(3 + i, 2) for i in range(12)])

    counter, limit = CompileCounter(), torch._dynamo.config.recompile_limit
    compile_with(monkeypatch, counter)
    task = Blocks()
    with compiled(task, True):
        for i, block in enumerate(task.blocks):
            block(torch.ones(1, 3 + i))
    assert counter.frame_count == 12
    assert torch._dynamo.config.recompile_limit == limit


@pytest.mark.skipif(not _ALONE, reason="this torch counts modules of one class together")
def test_endless_compiling_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that changes at each call is given up after torch's limit, independent of the other modules."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.n = nn.Parameter(torch.ones(1)), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n += 1
            return x * self.weight * self.n

    class Many(Line):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Counting() for _ in range(6)])

    counter = CompileCounter()
    compile_with(monkeypatch, counter)
    task = Many()
    with compiled(task, True), torch._dynamo.config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True):
        for _ in range(20):
            task.blocks[0](torch.ones(1))
    assert counter.frame_count <= torch._dynamo.config.recompile_limit + 1


class Batch(UserDict[str, torch.Tensor]):
    """A mapping with attributes, as tokenizers give."""

    def to(self, device: Any) -> Batch:
        """Stay."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


@pytest.mark.parametrize("room", [4, 1])
def test_a_batchs_class_survives_a_split(tmp_path: Path, room: int) -> None:
    """A batch of a class of its own stays one, split or not; places follow the pieces."""
    sizes: list[int] = []

    class Takes(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            sizes.append(len(batch.x))
            if len(batch.x) > room:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return functional.mse_loss(self(batch.x), batch.y)

    def collate(samples: Any) -> Batch:
        x, y = torch.utils.data.default_collate(samples)
        return Batch(x=x, y=y)

    quiet(tmp_path, halve_batch_on_oom=True).fit(Takes(), loader(8, collate_fn=collate))
    assert sizes[-1] == room


def test_a_piece_knows_its_samples(tmp_path: Path) -> None:
    """After a split, the error of a non-finite loss names the samples of its piece."""

    class Bad(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if rows(8).tensors[0][6].tolist() in batch[0].tolist() else loss

    with pytest.raises(TrainkitError, match=r"nan on rank 0, samples 6, 7 of the data set"):
        quiet(tmp_path, halve_batch_on_oom=True, stop_on_nonfinite=True).fit(Bad(), loader(8))


def test_an_error_in_teardown_leaves_no_switch_on(tmp_path: Path) -> None:
    """Global switches of torch are restored after any failure."""

    class Breaks(Line):
        def teardown(self, stage: str) -> None:
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        quiet(tmp_path, detect_anomaly=True).fit(Breaks(), loader(4))
    assert not torch.is_anomaly_enabled()


def test_overfitting_beside_limits_is_refused(tmp_path: Path) -> None:
    """Two answers to one question, and nothing at all, are refused by the key that was written."""
    for settings in ({"overfit_batches": 2, "limit_val_batches": 0}, {"overfit_batches": 0.0}):
        with pytest.raises(ConfigError, match=r"trainer\.overfit_batches is "):
            quiet(tmp_path, **settings)
