"""Ranks that differ: a job ends before its first step, and names key, values and ranks."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    TensorDataset,
)

from tests.helpers.elastic_threads import ElasticThreadEngine, Job
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, Numbered, loader, quiet, weights
from trainkit import callbacks
from trainkit.api.callback import Callback
from trainkit.callbacks import (
    EMA,
    DeviceStatsMonitor,
    Elastic,
    LambdaCallback,
    ModelCheckpoint,
    Stragglers,
)
from trainkit.data.streams import sharded
from trainkit.errors import ConfigError, DivergenceError
from trainkit.extension import public_names
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


class Averages(EMA):
    """A user's callback that extends one of trainkit's."""


class Own(Callback):
    """A callback of the user's alone."""

    def __init__(self, path: str) -> None:
        self.path = path


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
    "seed": (
        lambda rank, book: (Watched(book), loader(16), {"seed": rank}),
        "trainer.seed is 0 on rank 0 and 1 on rank 1",
    ),
    "shape": (
        lambda rank, book: (Wide(book, 3 + rank), loader(16), {}),
        "shape of more is [3] torch.float32 on rank 0",
    ),
    "kind": (
        lambda rank, book: ([Watched, Line][rank](*[book] * (1 - rank)), loader(16), {}),
        "task is Watched on rank 0",
    ),
    "hparams": (
        lambda rank, book: (Saving(book, dropout=0.1 * rank), loader(16), {}),
        "hparams.dropout is 0.0 on rank 0 and 0.1 on rank 1",
    ),
    "callback": (
        lambda rank, book: (
            Watched(book),
            loader(16),
            {"callbacks": ModelCheckpoint(every_n_train_steps=1 + rank)},
        ),
        "ModelCheckpoint.every_n_train_steps is 1 on rank 0 and 2 on rank 1",
    ),
    "interval": (
        lambda rank, book: (
            Watched(book),
            loader(16),
            {"callbacks": ModelCheckpoint(train_time_interval=timedelta(minutes=1 + rank))},
        ),
        "ModelCheckpoint.train_time_interval is 0:01:00 on rank 0 and 0:02:00 on rank 1",
    ),
    "number of callbacks": (
        lambda rank, book: (
            Watched(book),
            loader(16),
            {"callbacks": [Stragglers()] * rank, "enable_checkpointing": False},
        ),
        (
            "the list of callbacks is DivergenceGuard on rank 0 and Stragglers, DivergenceGuard on"
            " rank 1"
        ),
    ),
    "callback of the user's": (
        lambda rank, book: (Watched(book), loader(16), {"callbacks": Averages(0.9 + 0.01 * rank)}),
        "EMA.decay is 0.9 on rank 0 and 0.91 on rank 1",
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


def test_what_only_shows_and_the_users_own_may_differ(tmp_path: Path) -> None:
    """Scripts show things on rank 0 alone, and give their callbacks paths and numbers of a rank."""
    book: list[int] = []

    def work(engine: Any) -> None:
        is_main = engine.place == 0
        shows: list[Callback] = (
            [DeviceStatsMonitor(), LambdaCallback(on_fit_end=lambda *_: None)] if is_main else []
        )
        policy = ModelCheckpoint(dirpath=str(tmp_path / f"of rank {engine.place}"))
        callbacks = [*shows, policy, Own(f"rank {engine.place}")]
        quiet(
            tmp_path,
            engine=engine,
            callbacks=callbacks,
            enable_progress_bar=is_main,
            logger=is_main,
        ).fit(Watched(book), loader(16))

    World(2).run(work)
    assert book


def test_shapes_are_compared_before_an_engine_splits_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broadcast or a split of weights of other shapes would abort the processes (engine=fsdp)."""
    split: list[int] = []
    monkeypatch.setattr(ThreadEngine, "shard", lambda engine, task: split.append(engine.place))

    def work(engine: Any) -> None:
        with pytest.raises(DivergenceError, match="shape of more is"):
            quiet(tmp_path, engine=engine).fit(Wide([], 3 + engine.place), loader(16))

    World(2).run(work)
    assert split == []


GIVEN: dict[str, dict[str, Any]] = {
    "EarlyStopping": {"monitor": "val/loss"},
    "LoRA": {"target_modules": "all-linear"},
    "FaultInjection": {"faults": [{"do": "kill", "rank": 1, "step": 20}]},
    "Timer": {"duration": 60},
    "StochasticWeightAveraging": {"swa_lrs": 0.1},
}


def test_all_settings_of_our_callbacks_are_compared() -> None:
    """Each argument of a callback that ranks must share is an attribute of its name."""
    every = {
        **vars(callbacks),
        **{name: getattr(callbacks, name) for name in public_names("trainkit.callbacks")},
    }
    kinds = [
        kind for kind in every.values() if isinstance(kind, type) and issubclass(kind, Callback)
    ]
    compared = [kind for kind in kinds if not kind.may_differ and kind is not Callback]
    assert len(compared) >= 20
    for kind in compared:
        names = [
            name for name in inspect.signature(kind).parameters if name not in ("args", "kwargs")
        ]
        made = kind(**GIVEN.get(kind.__name__, {}))
        assert [
            name for name in names if not hasattr(made, name) and not hasattr(made, f"_{name}")
        ] == [], kind


def test_other_code_on_a_rank_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of the Task is named if its file's content differs."""
    from trainkit.run import replicas

    module = sys.modules[Watched.__module__]
    texts = iter([b"a", b"b"])
    real = Path.read_bytes
    monkeypatch.setattr(
        replicas.Path,
        "read_bytes",
        lambda path: next(texts) if str(path) == module.__file__ else real(path),
    )

    def work(engine: Any) -> None:
        quiet(tmp_path, engine=engine).fit(Watched([]), loader(16))

    with pytest.raises(DivergenceError, match=re.escape(f"the source of {Watched.__module__} is ")):
        World(2).run(work)


class Files(Dataset[Any]):
    """Reads files of a list."""

    def __init__(self, files: list[Any]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> Any:
        return torch.ones(3), torch.zeros(1)


class Sparse(Files):
    """Holds what has no rows to compare beside what has."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__([0] * len(rows))
        self.graph, self.later = torch.eye(3).to_sparse(), torch.empty(3, 3, device="meta")
        self.names, self.rows = np.array([None, "a", "b"], dtype=object), rows
        self.itself = self


def shares(rank: int) -> dict[str, Any]:
    """Return data sets of which a script gives each rank a part."""
    rows = torch.arange(24.0).reshape(8, 3)[rank::2]
    files = [(f"/data/{i}.jpg", 0) for i in range(8)][rank::2]
    return {
        "TensorDataset.tensors": TensorDataset(rows, torch.zeros(4, 1)),
        "Files.files": Files(files),
        "Sparse.rows": Sparse(rows),
        "ConcatDataset.datasets.files": ConcatDataset([Files(["a"]), Files(files)]),
    }


@pytest.mark.parametrize("kind", shares(0))
def test_data_split_by_a_script_are_reported(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many samples on each rank, but others: half of them would never be seen, in silence."""

    def work(engine: Any) -> None:
        quiet(tmp_path, engine=engine).fit(Line(), DataLoader(shares(engine.place)[kind], 2))

    World(2).run(work)
    text = capsys.readouterr().out
    assert text.count(f"Rank 1 has other training data than rank 0 ({kind}). ") == 1


def test_files_in_folders_of_a_host_are_the_same_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each host has its copy."""

    def work(engine: Any) -> None:
        files = Files([Path(f"/scratch{engine.place}/{i}.jpg") for i in range(8)])
        quiet(tmp_path, engine=engine).fit(Line(), DataLoader(files, 2))

    World(2).run(work)
    assert "other training data" not in capsys.readouterr().out


def test_a_part_of_the_data_for_each_rank_is_refused(tmp_path: Path) -> None:
    """A Subset by rank has as many samples on each: half of them would never be seen."""

    def work(engine: Any) -> None:
        part = Subset(Numbered(8), range(engine.place, 8, 2))
        quiet(tmp_path, engine=engine).fit(Watched([]), DataLoader(part, 2))

    with pytest.raises(DivergenceError, match="train_dataloaders.indices is .*trainkit.sharded"):
        World(2).run(work)


class Halves(Sampler[int]):
    """A sampler that splits itself over two ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 8, 2))

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("says_so", [True, False], ids=["with num_replicas", "without"])
def test_a_sampler_of_a_part_for_each_rank_is_refused(says_so: bool, tmp_path: Path) -> None:
    """As Horovod's ElasticSampler and those of timm: its order is split once more."""

    def work(engine: Any) -> None:
        sampler: Any = Halves(engine.place)
        if says_so:
            sampler.num_replicas = 2
        data = DataLoader(Numbered(8), 2, sampler=sampler)
        quiet(tmp_path, engine=engine).fit(Watched([]), data)

    text = "has a Halves; trainkit shards" if says_so else "A Halves draws other samples"
    with pytest.raises(ConfigError, match=text):
        World(2).run(work)


class Repeating(DataLoader[Any]):
    """A loader with an iterator of its own, as timm's MultiEpochsDataLoader."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


def in_repeating(part: Any) -> Any:
    """Return a loader that iterates itself."""
    part.num_replicas = 2
    return Repeating(Numbered(8), 2, sampler=part)


def in_batches(part: Any) -> Any:
    """Return a loader with a batch sampler of its own."""
    batches = type("Pairs", (BatchSampler,), {})(part, 2, False)
    return DataLoader(Numbered(8), batch_sampler=batches)


@pytest.mark.parametrize(
    ("make", "text"),
    [(in_repeating, "has a Halves; trainkit shards"), (in_batches, "A Pairs draws other samples")],
)
def test_batches_of_a_part_for_each_rank_are_refused(make: Any, text: str, tmp_path: Path) -> None:
    """Of a loader that iterates itself, and of a batch sampler: most samples were left out."""

    def work(engine: Any) -> None:
        quiet(tmp_path, engine=engine).fit(Watched([]), make(Halves(engine.place)))

    with pytest.raises(ConfigError, match=text):
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
