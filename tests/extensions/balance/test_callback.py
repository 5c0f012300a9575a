"""Balance: samples are split over ranks by their own measured speed;
a resumed run splits alike, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, Numbered, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.api.datamodule import DataModule
from trainkit.api.task import Task
from trainkit.api.view import RunView
from trainkit.callbacks import Balance, ModelCheckpoint
from trainkit.callbacks.step_clock import StepClock
from trainkit.errors import ConfigError

SECONDS = (1.0, 3.0)  # that a sample takes each rank


class Timed(Line):
    """Moves a clock of its own by the seconds of each sample, and notes which samples came."""

    def __init__(self, sample_s: float) -> None:
        super().__init__(lr=0.02, momentum=0.9)
        self.sample_s, self.now = sample_s, 0.0
        self.came: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Train."""
        self.came.append(batch[2].tolist())
        self.now += self.sample_s * len(batch[0])
        return super().training_step(batch[:2], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Take long, which no measured time may hold."""
        self.now += 1000.0


class Result:
    """A rank's fit."""

    def __init__(self, task: Timed, balance: Balance, trainer: Any) -> None:
        self.weights, self.came, self.changes = weights(task), task.came, balance.changes
        self.plan, self.contract = trainer.run.train_feed.plan_of(0), trainer.run.batch_plan


def fit(
    folder: Path, settings: dict[str, Any], sample_s: Sequence[float] = SECONDS, **options: Any
) -> list[Result]:
    """Train on a rank for each of `sample_s`; 64 samples, 8 of a rank in a step."""
    ckpt_path, workers = options.pop("ckpt_path", None), options.pop("num_workers", 0)
    more, val = options.pop("more", list), options.pop("val", None)

    def work(engine: ThreadEngine) -> Result:
        task, balance = Timed(sample_s[engine.place]), Balance(**settings)
        clock = StepClock(now=lambda: task.now)
        trainer = quiet(folder, engine=engine, callbacks=[clock, balance, *more()], **options)
        data = loader(Numbered(64), 8, shuffle=True, num_workers=workers)
        trainer.fit(task, data, val, ckpt_path=ckpt_path)
        return Result(task, balance, trainer)

    return World(len(sample_s)).run(work)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_slower_rank_gets_fewer_samples(
    num_workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, within the epoch; each step keeps its samples and their order,
    and the weights stay those of even shares.
    """
    even = fit(tmp_path / "a", {"min_gain": 1e9}, max_epochs=3)
    balanced = fit(
        tmp_path / "b", {"every_n_steps": 2, "damping": 0.0}, max_epochs=3, num_workers=num_workers
    )
    assert [rank.changes for rank in even] == [[], []]
    assert [rank.changes for rank in balanced] == [[(2, (12, 4))]] * 2
    for results in (even, balanced):
        assert results[0].contract.global_batch_size == 16
    for step in range(12):
        before, now = (
            [index for rank in ranks for index in rank.came[step]] for ranks in (even, balanced)
        )
        assert before == now
        assert [len(rank.came[step]) for rank in balanced] == ([8, 8] if step < 2 else [12, 4])
    for rank in balanced:
        torch.testing.assert_close(rank.weights, even[0].weights, rtol=0, atol=1e-6)
        assert rank.contract.rank_shares == "3:1"
    said = capsys.readouterr().out
    assert (
        said.count(
            "Balance: after step 2 samples are split 12:4 (even before); a sample takes rank 1"
            " 3e+03 ms"
        )
        == 1
    )


def test_by_default_it_looks_at_an_epochs_end_and_goes_most_of_the_way(tmp_path: Path) -> None:
    """Four steps an epoch; the last change left less than a tenth to gain, so there is no other."""
    ranks = fit(tmp_path, {}, max_epochs=6)
    assert ranks[0].changes == ranks[1].changes == [(4, (11, 5)), (8, (12, 4))]


def test_a_small_gain_is_left_alone(tmp_path: Path) -> None:
    """A rank slower by a twentieth; and equal ranks, bit for bit as without the callback."""
    assert fit(tmp_path, {"every_n_steps": 2}, (1.0, 1.05), max_epochs=2)[0].changes == []


class AtValidation(Callback):
    """Notes the contract's shares when a validation ends: a checkpoint may be saved then."""

    def __init__(self) -> None:
        self.shares: list[str] = []

    def on_validation_end(self, trainer: RunView, task: Task) -> None:
        """Note them."""
        self.shares.append(trainer.batch_plan.rank_shares)


def test_a_validation_is_no_part_of_a_ranks_speed(tmp_path: Path) -> None:
    """Within an epoch too, where it runs before the step's end; the ranks look before it, so that a
    checkpoint which it leads to holds the shares that the next step is split in."""
    seen: list[AtValidation] = []

    def more() -> list[Callback]:
        seen.append(AtValidation())
        return seen[-1:]

    settings = {"every_n_steps": 2, "damping": 0.0}
    found = fit(
        tmp_path,
        settings,
        max_epochs=2,
        val=loader(Numbered(4), 2),
        val_check_interval=2,
        more=more,
    )
    assert found[0].changes == [(2, (12, 4))]
    assert [own.shares[1:] for own in seen] == [["3:1"] * 4] * 2, (
        "the first one is the sanity check"
    )


def test_a_rank_takes_no_more_than_its_memory_allows(tmp_path: Path) -> None:
    """A limit for all ranks, and one for each."""
    assert fit(tmp_path / "a", {"every_n_steps": 2, "max_microbatch": 10}, max_epochs=2)[0].changes[
        -1
    ][1] == (10, 6)
    limited = {"every_n_steps": 2, "max_microbatch": [9, 16]}
    assert fit(tmp_path / "b", limited, max_epochs=2)[0].changes[-1][1] == (9, 7)


def test_three_ranks_have_shares_by_their_speeds(tmp_path: Path) -> None:
    """The fastest of three takes half."""
    ranks = fit(tmp_path, {"every_n_steps": 2, "damping": 0.0}, (1.0, 2.0, 3.0), max_epochs=2)
    assert ranks[0].changes == [(2, (13, 7, 4))]


@pytest.mark.parametrize(("at", "damping"), [(3, 0.0), (4, 0.25), (5, 0.0), (6, 0.25)])
def test_a_resumed_run_has_the_same_shares(at: int, damping: float, tmp_path: Path) -> None:
    """The checkpoint's shares split the first step after it, within an epoch and at its end; weights
    and samples end bit for bit as in the run that never stopped."""
    settings = {"every_n_steps": 2, "damping": damping}
    whole = fit(tmp_path / "whole", settings, max_steps=12)
    save = {
        "more": lambda: [ModelCheckpoint(every_n_train_steps=at, every_n_epochs=1, save_top_k=-1)]
    }
    fit(tmp_path / "cut", settings, max_steps=at, **save)
    resumed = fit(tmp_path / "cut", settings, max_steps=12, ckpt_path="last")
    for before, after in zip(whole, resumed, strict=True):
        assert after.came == before.came[at:]
        assert torch.equal(after.weights, before.weights)
        assert after.contract.rank_shares == before.contract.rank_shares != "even"
    even = fit(tmp_path / "even", {"min_gain": 1e9}, max_steps=12)
    assert not torch.equal(even[0].weights, whole[0].weights), (
        "the changes would be seen in the weights"
    )


def test_loaders_that_are_made_again_are_split_alike(tmp_path: Path) -> None:
    """The shares outlive the feed (trainer.reload_dataloaders_every_n_epochs)."""

    class Data(DataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return loader(Numbered(64), 8)

    def work(engine: ThreadEngine) -> list[list[int]]:
        task = Timed(SECONDS[engine.place])
        callbacks = [StepClock(now=lambda: task.now), Balance(damping=0.0)]
        trainer = quiet(
            tmp_path,
            engine=engine,
            callbacks=callbacks,
            max_epochs=3,
            reload_dataloaders_every_n_epochs=1,
        )
        trainer.fit(task, datamodule=Data())
        return task.came

    assert [[len(batch) for batch in came] for came in World(2).run(work)] == [
        [8] * 4 + [12] * 8,
        [8] * 4 + [4] * 8,
    ]


def test_at_another_number_of_ranks_it_begins_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shares of two ranks say nothing about three; the run says that they have changed."""
    save = {"more": lambda: [ModelCheckpoint(every_n_train_steps=4, every_n_epochs=1)]}
    fit(tmp_path, {"every_n_steps": 2, "damping": 0.0}, max_steps=4, **save)
    ranks = fit(tmp_path, {"min_gain": 1e9}, (1.0, 1.0, 1.0), max_steps=6, ckpt_path="last")
    assert ranks[0].plan.shares is None
    assert "rank_shares was 3:1, is even" in capsys.readouterr().out


class Stream:
    """Batches without a length."""

    def __iter__(self) -> Any:
        yield from DataLoader(Numbered(8), 4)


def refused(
    folder: Path, settings: dict[str, Any], data: Any = None, prepare: Any = None, **options: Any
) -> str:
    """Return the error of a fit at two ranks."""

    def work(engine: ThreadEngine) -> None:
        if prepare is not None:
            prepare(engine)
        quiet(folder, engine=engine, callbacks=Balance(**settings), max_steps=2, **options).fit(
            Timed(1.0), data or loader(Numbered(64), 8)
        )

    with pytest.raises(ConfigError) as error:
        World(2).run(work)
    return str(error.value)


def test_what_cannot_be_balanced_is_refused(tmp_path: Path) -> None:
    """Streams, ranks that wait for each other within a step, limits that do not fit:
    each with the way out.
    """
    assert "the training data is a stream" in refused(tmp_path, {}, Stream())
    assert "with trainer.sync_batchnorm=true ranks wait" in refused(
        tmp_path, {}, sync_batchnorm=True
    )
    parted = refused(
        tmp_path, {}, prepare=lambda engine: setattr(engine, "needs_even_rounds", True)
    )
    assert (
        "ranks wait for each other within forward and backward" in parted
        and "trainer.rank_shares" in parted
    )
    assert "max_microbatch is [9], and there are 2 ranks" in refused(
        tmp_path, {"max_microbatch": [9]}
    )
    assert "2 ranks take 14 samples at a time at most, but their microbatches have 16" in refused(
        tmp_path, {"max_microbatch": 7}
    )
    begun = refused(tmp_path, {"max_microbatch": [12, 6]})
    assert (
        "rank 1 begins with microbatches of 8 samples" in begun
        and "trainer.rank_shares=[12, 6]" in begun
    )


def test_bad_settings_are_refused() -> None:
    """Each with what is legal."""
    with pytest.raises(ConfigError, match=r"callbacks.balance.damping is 1; it must be below 1"):
        Balance(damping=1)
    with pytest.raises(
        ConfigError,
        match=r"callbacks.balance.every_n_steps is 0; it must be a whole number, 1 or more",
    ):
        Balance(every_n_steps=0)
    with pytest.raises(
        ConfigError, match=r"callbacks.balance.max_microbatch is \[4, 0\]; it must be"
    ):
        Balance(max_microbatch=[4, 0])


def test_one_rank_trains_as_without_it(tmp_path: Path) -> None:
    """There is nothing to split."""
    task, balance = Timed(1.0), Balance(every_n_steps=1)
    quiet(tmp_path, callbacks=balance, max_steps=3).fit(task, loader(Numbered(64), 8))
    assert balance.changes == [] and isinstance(weights(task), Tensor)
