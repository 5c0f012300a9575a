"""Ranks that differ: a job ends before its first step, and names key, values and ranks."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.elastic_threads import ElasticThreadEngine, Job
from tests.helpers.threads import World
from tests.helpers.toy import Line, Numbered, loader, quiet, weights
from trainkit.callbacks import Elastic
from trainkit.data.streams import sharded
from trainkit.errors import DivergenceError
from trainkit.trainer import Trainer


class Watched(Line):
    """Counts its training steps."""

    def __init__(self, book: list[int], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.book = book

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Note the call."""
        self.book.append(batch_idx)
        return super().training_step(batch[:2], batch_idx)


class Wide(Watched):
    """Has a second tensor."""

    def __init__(self, book: list[int], size: int) -> None:
        super().__init__(book)
        self.register_buffer("more", torch.zeros(size))


class Saving(Watched):
    """Saves its arguments."""

    def __init__(self, book: list[int], dropout: float = 0.0, local_rank: int = 0) -> None:
        super().__init__(book)
        self.save_hyperparameters(ignore="book")


# rank -> (task, data, Trainer's arguments); the words of the error
DIFFERENT: dict[str, tuple[Any, str]] = {
    "rate": (
        lambda rank, book: (Watched(book, lr=0.1 + rank), loader(16), {}),
        "optimizer.lr is 0.1 on rank 0 and 1.1 on rank 1",
    ),
    "momentum": (
        lambda rank, book: (Watched(book, momentum=0.5 * rank), loader(16), {}),
        "optimizer.momentum is 0.0 on rank 0 and 0.5 on rank 1",
    ),
    "batch": (
        lambda rank, book: (Watched(book), loader(16, batch_size=4 + rank), {}),
        "train_dataloaders.batch_size is 4 on rank 0 and 5 on rank 1",
    ),
    "length": (
        lambda rank, book: (Watched(book), loader(16 + rank), {}),
        "train_dataloaders.samples is 16 on rank 0 and 17 on rank 1",
    ),
    "option": (
        lambda rank, book: (Watched(book), loader(16), {"gradient_clip_val": 1.0 + rank}),
        "trainer.gradient_clip_val is 1.0 on rank 0 and 2.0 on rank 1",
    ),
    "seed": (lambda rank, book: (Watched(book), loader(16), {"seed": rank}), "trainer.seed is 0 on rank 0 and 1 on rank 1"),
    "shape": (
        lambda rank, book: (Wide(book, 3 + rank), loader(16), {}),
        "shape of more is [3] torch.float32 on rank 0",
    ),
    "kind": (lambda rank, book: ([Watched, Line][rank](*[book] * (1 - rank)), loader(16), {}), "task is Watched on rank 0"),
    "hparams": (
        lambda rank, book: (Saving(book, dropout=0.1 * rank), loader(16), {}),
        "hparams.dropout is 0.0 on rank 0 and 0.1 on rank 1",
    ),
    "data": (
        lambda rank, book: (Watched(book), loader(16) if rank else [torch.zeros(4, 3)] * 4, {}),
        "train_dataloaders is a stream on rank 0 and (not set) on rank 1",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_difference_ends_all_ranks_before_the_first_step(what: str, tmp_path: Path) -> None:
    """All ranks raise the same error, with key, both values and both ranks; no batch was seen."""
    make, words = DIFFERENT[what]
    book: list[int] = []

    def work(engine: Any) -> str:
        task, data, settings = make(engine.place, book)
        with pytest.raises(DivergenceError) as caught:
            quiet(tmp_path, engine=engine, **settings).fit(task, data)
        return str(caught.value)

    texts = World(2).run(work)
    assert texts[0] == texts[1]
    assert words in texts[0]
    assert book == []


def test_other_code_on_a_rank_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of the Task is named if its file's content differs."""
    from trainkit.run import replicas

    module = sys.modules[Watched.__module__]
    texts = iter([b"a", b"b"])
    real = Path.read_bytes
    monkeypatch.setattr(replicas.Path, "read_bytes", lambda path: next(texts) if str(path) == module.__file__ else real(path))

    def work(engine: Any) -> None:
        quiet(tmp_path, engine=engine).fit(Watched([]), loader(16))

    with pytest.raises(DivergenceError, match=re.escape(f"the source of {Watched.__module__} is ")):
        World(2).run(work)


def test_what_belongs_to_a_rank_may_differ(tmp_path: Path) -> None:
    """Numbers of ranks, random weights, folders and declared shards differ, and training runs."""
    book: list[int] = []

    def work(engine: Any) -> torch.Tensor:
        task = Saving(book, local_rank=engine.place)
        nn.init.normal_(task.model.weight)
        data = sharded(list(loader(8 + 4 * engine.place)))
        quiet(tmp_path / str(engine.place), engine=engine).fit(task, data, loader(8))
        return weights(task)

    first, second = World(2).run(work)
    assert torch.equal(first, second)
    assert book


def fit_in_job(job_folder: Path, engine: ElasticThreadEngine, lr: float, on_step: Any) -> None:
    """Fit with a rate."""

    class Stepping(Watched):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            on_step(engine)
            return super().training_step(batch, batch_idx)

    trainer = Trainer(
        engine=engine,
        max_epochs=3,
        run_dir=str(job_folder),
        callbacks=[Elastic(commit_every_n_steps=2)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Stepping([], lr=lr), loader(Numbered(50)))


@pytest.mark.parametrize(("late_lr", "ends"), [(0.05, True), (0.2, False)])
def test_a_rank_that_joins_late_is_compared_too(late_lr: float, ends: bool, tmp_path: Path) -> None:
    """Another rate on a joining worker ends the job; an equal one trains to the end."""
    joined: list[str] = []

    def on_step(engine: ElasticThreadEngine) -> None:
        if engine.worker == "a" and not joined and engine.ranks.rank == 0:
            joined.append("c")
            job.add("c")

    def work(engine: ElasticThreadEngine) -> None:
        fit_in_job(tmp_path / "run", engine, late_lr if engine.worker == "c" else 0.05, on_step)

    job = Job(work, first=2)
    with contextlib.suppress(DivergenceError):
        job.run("ab")
    texts = {str(error) for error in job.errors.values()}
    assert joined
    assert (texts == set()) is ends, job.errors
    assert ends or "optimizer.lr is " in "".join(texts)
