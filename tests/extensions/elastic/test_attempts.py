"""Elastic training, with workers that are threads:
the training and its samples do not depend on deaths of workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers.elastic_threads import ElasticThreadEngine, ElasticThreadRanks, Job, Killed
from tests.helpers.threads import ThreadCollectives
from tests.helpers.toy import Line, Numbered, Numbers
from trainkit.api.callback import Callback
from trainkit.api.datamodule import DataModule
from trainkit.api.view import RunView
from trainkit.callbacks import Elastic, ModelCheckpoint
from trainkit.checkpoint.format import Snapshot
from trainkit.checkpoint.store import LocalStore
from trainkit.data.streams import sharded
from trainkit.engine.collectives import PeerError
from trainkit.errors import ConfigError, Dismissed, EngineError, Preempted
from trainkit.extensions.elastic.attempts import ElasticRun, is_own
from trainkit.loggers import CSVLogger
from trainkit.optim import schedule_free
from trainkit.run.elastic import ElasticState
from trainkit.trainer import Trainer

SAMPLES, EPOCHS = 50, 3


class Journal(Callback):
    """Records the samples of each step; a repeated step replaces the lost one."""

    lock = threading.Lock()

    def __init__(
        self,
        engine: ElasticThreadEngine,
        events: dict[tuple[str, int], Callable[[], None]],
        book: dict[Any, Any],
    ) -> None:
        self._engine, self._events, self.book = engine, events, book

    def on_train_batch_start(
        self, trainer: RunView, task: Line, batch: Any, batch_idx: int
    ) -> None:
        """Note a microbatch under (epoch, step), with the generation that it belongs to."""
        key, generation = (trainer.current_epoch, trainer.global_step), len(self._engine.job.sizes)
        with self.lock:
            self.book.setdefault(key, []).append((generation, batch[2].tolist()))

    def on_before_optimizer_step(self, trainer: RunView, task: Line, optimizer: Any) -> None:
        """Trigger this worker's event of this step, once."""
        if event := self._events.pop((self._engine.worker, trainer.global_step), None):
            event()


def kill() -> None:
    """Be gone."""
    raise Killed


def run(
    tmp_path: Path,
    workers: str,
    events: dict[tuple[str, int], Callable[[Job], None]] | None = None,
    commit: int = 2,
    batch_size: int = 4,
    stream: Callable[[list[Any]], Any] | None = None,
    make_task: Callable[[], Numbers] | None = None,
    make_callbacks: Callable[[], list[Callback]] = list,
    **settings: Any,
) -> tuple[Job, dict[Any, Any], dict[str, Tensor], Trainer]:
    """Fit with these workers; return the job, the journal, the last weights of each,
    and a surviving Trainer.
    """
    book: dict[Any, Any] = {}
    trainers: dict[str, Trainer] = {}
    weights: dict[str, Tensor] = {}

    def work(engine: ElasticThreadEngine) -> None:
        task = (make_task or Numbers)()
        own = {key: lambda e=event: e(job) for key, event in (events or {}).items()}
        trainer = Trainer(
            engine=engine,
            max_epochs=EPOCHS,
            run_dir=str(tmp_path / "run"),
            callbacks=[
                Journal(engine, own, book),
                Elastic(commit_every_n_steps=commit),
                *make_callbacks(),
            ],
            logger=[CSVLogger()],
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **{"enable_checkpointing": False} | settings,
        )
        trainers[engine.worker] = trainer
        data = DataLoader(Numbered(SAMPLES), batch_size=batch_size, shuffle=True)
        batches = [
            torch.utils.data.default_collate([Numbered(SAMPLES)[i] for i in range(n, n + 4)])
            for n in range(0, 48, 4)
        ]
        trainer.fit(
            task, stream(batches) if stream else data, DataLoader(Numbered(SAMPLES), batch_size=4)
        )
        weights[engine.worker] = torch.cat([p.detach().flatten() for p in task.parameters()])

    job = Job(work, len(workers))
    job.run(workers)
    return job, book, weights, next(t for w, t in trainers.items() if w in weights)


def check_exactly_once(book: dict[Any, Any], samples: int = SAMPLES) -> None:
    """Each epoch's steps, as they were trained last, hold each sample once."""
    for epoch in range(EPOCHS):
        seen: list[int] = []
        for (of, _), parts in book.items():
            last = max(generation for generation, _ in parts)
            seen += [
                i for generation, ids in parts if of == epoch and generation == last for i in ids
            ]
        assert sorted(seen) == list(range(samples)), f"epoch {epoch}"


def read_rows(tmp_path: Path) -> list[str]:
    """Return metrics.csv without the rate's rounding."""
    lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    return [
        ",".join(f"{float(cell):.5f}" if "." in cell else cell for cell in line.split(","))
        for line in lines
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, list[str]]:
    """The weights and metrics of three ranks to which nothing happens."""
    place = tmp_path_factory.mktemp("undisturbed")
    _, book, weights, _ = run(place, "abc")
    check_exactly_once(book)
    return weights["a"], read_rows(place)


def test_a_recovery_gives_torchs_cache_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two attempts on a GPU what still waits is ended, and the memory that torch holds is
    freed: NCCL starts again, and allocates beside it.
    """
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty_cache"))
    elastic = ElasticRun(lambda attempt: None)
    engine: Any = SimpleNamespace(device=torch.device("cuda", 0), comm=SimpleNamespace())
    engine.comm.is_loss = lambda error: isinstance(error, PeerError)
    engine.comm.abort = lambda: events.append("abort")
    engine.comm.disconnect = lambda: events.append("disconnect")

    def fit(state: ElasticState) -> None:
        state.attempt = SimpleNamespace(engine=engine, is_elastic=True, is_set_up=True)  # type: ignore[assignment]
        events.append("fit")
        if len(events) == 1:
            raise PeerError("Another rank ended")

    elastic.go(fit)
    assert events == ["fit", "abort", "disconnect", "empty_cache", "fit"]


@pytest.mark.parametrize("victims", ["b", "a", "ab"])
@pytest.mark.parametrize("step", [0, 1, 3, 7, 10])
def test_ranks_that_die_change_nothing_of_what_is_trained(
    tmp_path: Path, undisturbed: tuple[Tensor, list[str]], victims: str, step: int
) -> None:
    """If any worker dies at any step, the others train each sample once,
    to the same weights and epoch values.
    """
    job, book, weights, _ = run(
        tmp_path, "abc", {(victim, step): lambda job: kill() for victim in victims}
    )
    assert job.sizes[0] == 3 and job.sizes[-1] == 3 - len(victims)
    check_exactly_once(book)
    assert set(weights) == set("abc") - set(victims)
    for held in weights.values():
        torch.testing.assert_close(held, undisturbed[0], rtol=1e-5, atol=1e-6)
    assert read_rows(tmp_path) == undisturbed[1]


class Free(Numbers):
    """Evaluated at averages, which a commit holds in place of the trained weights."""

    def configure_optimizers(self) -> Any:
        """Return AdamW without a schedule."""
        return schedule_free(self.parameters(), 0.02)


class Drops(Numbers):
    """Its checkpoints lack a weight, as those of a frozen part of a model do."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Drop it."""
        del checkpoint["state_dict"][next(iter(self.state_dict()))]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Spoil what is handed over: a commit is loaded whole, and may be needed again."""
        checkpoint["state_dict"].clear()


def test_a_commit_has_the_weights_that_hooks_keep_out_of_checkpoints(
    tmp_path: Path, undisturbed: tuple[Tensor, list[str]]
) -> None:
    """Two deaths, and each time the run continues from memory, as it does without hooks."""
    events: dict[tuple[str, int], Callable[[Job], None]] = {
        ("a", 3): lambda job: kill(),
        ("b", 7): lambda job: kill(),
    }
    job, _, weights, _ = run(tmp_path, "abc", events, make_task=Drops)
    assert job.sizes == [3, 2, 1]
    torch.testing.assert_close(weights["c"], undisturbed[0], rtol=1e-5, atol=1e-6)


def test_weights_that_a_commit_set_aside_are_trained_on(tmp_path: Path) -> None:
    """After a death and an arrival, an optimizer with train() and eval() ends where it would."""
    pytest.importorskip("schedulefree")
    _, _, plain, _ = run(tmp_path / "plain", "abc", make_task=Free)
    events: dict[tuple[str, int], Callable[[Job], None]] = {
        ("a", 3): lambda job: kill(),
        ("b", 7): lambda job: job.add("d"),
    }
    job, _, weights, _ = run(tmp_path / "other", "abc", events, make_task=Free)
    assert job.sizes == [3, 2, 3]
    for held in weights.values():
        torch.testing.assert_close(held, plain["c"], rtol=1e-5, atol=1e-6)


def test_ranks_that_come_take_part_from_the_next_step_on(
    tmp_path: Path, undisturbed: tuple[Tensor, list[str]]
) -> None:
    """A worker that comes while the others train gets all of their state,
    and no step is lost or trained twice.
    """
    job, book, weights, _ = run(tmp_path, "abc", {("b", 4): lambda job: job.add("d")})
    assert job.sizes == [3, 4]
    check_exactly_once(book)
    assert all(len({generation for generation, _ in parts}) == 1 for parts in book.values()), (
        "a step was trained twice"
    )
    assert set(weights) == set("abcd")
    for held in weights.values():
        torch.testing.assert_close(held, undisturbed[0], rtol=1e-5, atol=1e-6)


def test_a_rank_that_dies_and_one_that_comes(
    tmp_path: Path, undisturbed: tuple[Tensor, list[str]]
) -> None:
    """Rank 0 dies, a new one comes later, another dies: one history in the files."""
    events = {
        ("a", 2): lambda job: kill(),
        ("b", 6): lambda job: job.add("d"),
        ("c", 9): lambda job: kill(),
    }
    job, book, weights, _ = run(tmp_path, "abc", events)
    assert job.sizes == [3, 2, 3, 2]
    check_exactly_once(book)
    assert set(weights) == set("bd")
    for held in weights.values():
        torch.testing.assert_close(held, undisturbed[0], rtol=1e-5, atol=1e-6)
    assert read_rows(tmp_path) == undisturbed[1]


def test_the_contract_is_that_of_the_beginning(tmp_path: Path) -> None:
    """Learning rate, samples of a step and schedule stay those
    of three ranks if one trains alone.
    """
    job, _, _, trainer = run(
        tmp_path, "abc", {("b", 3): lambda job: kill(), ("a", 3): lambda job: kill()}
    )
    assert job.sizes[-1] == 1
    assert (
        trainer.batch_plan.world_size,
        trainer.batch_plan.global_batch_size,
        trainer.batch_plan.lr_factor,
    ) == (3, 12, 3.0)
    assert trainer.global_step == EPOCHS * 5


def test_rank_0_continues_the_checkpoints_of_a_dead_one(tmp_path: Path) -> None:
    """Checkpoints pass to the new rank 0;
    the last one is of the last step, and nothing else is left.
    """
    keep = {"enable_checkpointing": True, "make_callbacks": lambda: [ModelCheckpoint(save_top_k=1)]}
    run(tmp_path, "abc", {("a", 7): lambda job: kill()}, **keep)
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["best", "epoch=2-step=15", "last"]


def test_an_error_that_comes_again_and_again_ends_the_run(tmp_path: Path) -> None:
    """Ranks that fail at the same step each time, although none is lost,
    end with an error that reports it.
    """

    class Sender(Callback):
        def on_before_optimizer_step(self, trainer: RunView, task: Line, optimizer: Any) -> None:
            if trainer.global_step == 3:
                trainer.engine.comm.world.break_off()  # type: ignore[attr-defined]

    with pytest.raises(Exception, match=r"formed again 5 times.*step 2"):
        run(tmp_path, "ab", make_callbacks=lambda: [Sender()])


def test_a_limit_in_batches_stays_that_of_the_beginning(tmp_path: Path) -> None:
    """Validation, and the values that monitors compare,
    cover the same set at any number of ranks.
    """
    values = []
    for events in ({}, {("b", 3): lambda job: kill()}):
        folder = tmp_path / str(len(events))
        run(folder, "abc", events, limit_val_batches=2, limit_train_batches=3)
        values.append(read_rows(folder))
    assert values[0] == values[1]


def test_more_ranks_than_samples_of_a_step_are_no_error(tmp_path: Path) -> None:
    """A rank that has come and has no sample in a step takes part with nothing."""
    job, book, _, trainer = run(
        tmp_path,
        "a",
        {("a", 2): lambda job: job.add("b"), ("a", 4): lambda job: job.add("c")},
        batch_size=2,
    )
    assert job.sizes == [1, 2, 3] and trainer.batch_plan.global_batch_size == 2
    check_exactly_once(book)


def test_growing_beyond_what_batch_norm_can_take_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the third rank comes: --max-np is known."""
    monkeypatch.setattr(ElasticThreadRanks, "max_world_size", 3)
    with pytest.raises(ConfigError, match=r"2 samples for\s+3 ranks.*--max-np 2"):
        run(tmp_path, "ab", sync_batchnorm=True)
    monkeypatch.setattr(ElasticThreadRanks, "max_world_size", 0)
    with pytest.raises(ConfigError, match="without --max-np"):
        run(tmp_path, "ab", sync_batchnorm=True)


class Best(Callback):
    """Has state on rank 0 only."""

    def __init__(self) -> None:
        self.best: Tensor | None = None
        self.loaded: list[Any] = []

    def on_train_step_end(self, trainer: RunView, task: Line) -> None:
        """Store a value on the rank that writes files."""
        if trainer.is_global_zero:
            self.best = torch.tensor([float(trainer.global_step)])

    def state_dict(self) -> dict[str, Any]:
        """Keep it."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self.loaded.append(state_dict["best"])


def test_what_rank_0_alone_knows_passes_to_the_next_rank_0(tmp_path: Path) -> None:
    """Plain values, and tensors too."""
    _, _, _, trainer = run(
        tmp_path, "abc", {("a", 5): lambda job: kill()}, make_callbacks=lambda: [Best()]
    )
    (best,) = [c for c in trainer.callbacks if isinstance(c, Best)]
    assert [b.item() for b in best.loaded] == [4.0]


def test_a_shared_stream_continues_exactly(tmp_path: Path) -> None:
    """The batches of a lost rank go to the others: each sample once."""
    _, book, _, _ = run(tmp_path, "abc", {("b", 2): lambda job: kill()}, stream=list)
    check_exactly_once(book, 48)


def test_a_stream_of_each_ranks_own_continues_approximately(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts that the user sharded cannot be sharded again;
    a step takes as many batches as before, up to rounding.
    """
    _, book, _, _ = run(tmp_path, "ab", {("b", 6): lambda job: kill()}, stream=sharded)
    assert (
        "of its own: for the 1 microbatches of each of 2 ranks a step takes 2 of each of 1"
        in capsys.readouterr().out
    )
    (last,) = {
        max(generation for generation, _ in parts)
        for (epoch, _), parts in book.items()
        if epoch == EPOCHS - 1
    }
    sizes = {
        sum(len(ids) for of, ids in parts if of == last)
        for (epoch, _), parts in book.items()
        if epoch == EPOCHS - 1
    }
    assert sizes == {8}, "a step stays 8 samples"


def test_an_elastic_job_without_the_callback_is_refused(tmp_path: Path) -> None:
    """Its fit would end with the first rank that goes."""

    def work(engine: ElasticThreadEngine) -> None:
        Trainer(engine=engine, max_epochs=1, run_dir=str(tmp_path)).fit(
            Numbers(), DataLoader(Numbered(SAMPLES), batch_size=4)
        )

    job = Job(work, 1)
    with pytest.raises(ConfigError, match=r"job is elastic .*Add callbacks=elastic"):
        job.run("a")


class Ends(Numbers):
    """Notes how a fit ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[str] = []

    def setup(self, stage: str) -> None:
        """Note it."""
        self.ends.append("setup")

    def teardown(self, stage: str) -> None:
        """Note it."""
        self.ends.append("teardown")


@pytest.mark.parametrize("fails", [False, True])
def test_a_task_is_set_up_and_torn_down_once_whatever_happens_in_between(
    tmp_path: Path, fails: bool
) -> None:
    """Also if the fit ends between two attempts; on_exception reports the error."""
    tasks: list[Ends] = []
    said: list[str] = []

    class Noted(Callback):
        def on_exception(self, trainer: RunView, task: Line, exception: BaseException) -> None:
            said.append(type(exception).__name__)

        def on_before_optimizer_step(self, trainer: RunView, task: Line, optimizer: Any) -> None:
            if trainer.global_step == 3 and (fails or len(trainer.engine.job.sizes) < 3):  # type: ignore[attr-defined]
                trainer.engine.comm.world.break_off()  # type: ignore[attr-defined]

    def make() -> Ends:
        tasks.append(Ends())
        return tasks[-1]

    if fails:
        with pytest.raises(EngineError, match="formed again 5 times"):
            run(tmp_path, "a", make_callbacks=lambda: [Noted()], make_task=make)
    else:
        run(tmp_path, "a", make_callbacks=lambda: [Noted()], make_task=make)
    assert tasks[0].ends == ["setup", "teardown"]
    assert said == ["EngineError"] * fails


class Prepared(DataModule):
    """Notes when data are prepared, and whether others waited for it."""

    def __init__(self, engine: ElasticThreadEngine, book: list[tuple[str, str, bool]]) -> None:
        self.engine, self.book = engine, book

    def prepare_data(self) -> None:
        """Note it."""
        self.book.append(
            (self.engine.worker, "prepare", self.engine.worker in self.engine.job.assigned)
        )

    def setup(self, stage: str) -> None:
        """Note it."""
        self.book.append(
            (self.engine.worker, "setup", self.engine.worker in self.engine.job.assigned)
        )

    def train_dataloader(self) -> Any:
        """Return numbered rows."""
        return DataLoader(Numbered(SAMPLES), batch_size=4, shuffle=True)


def test_a_late_rank_has_its_data_before_the_others_wait_for_it(tmp_path: Path) -> None:
    """A download on a new host must not stop all ranks;
    the continuing ones prepare nothing again.
    """
    seen: list[tuple[str, str, bool]] = []

    class Grow(Callback):
        def on_train_step_end(self, trainer: RunView, task: Line) -> None:
            engine = trainer.engine
            assert isinstance(engine, ElasticThreadEngine)
            if engine.worker == "a" and trainer.global_step == 3 and len(engine.job.sizes) == 1:
                engine.job.add("c")

    def work(engine: ElasticThreadEngine) -> None:
        engine.ranks.joins_late = engine.worker == "c"
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        options: dict[str, Any] = dict.fromkeys(quiet, False)
        trainer = Trainer(
            engine=engine,
            max_epochs=2,
            run_dir=str(tmp_path),
            callbacks=[Grow(), Elastic()],
            **options,
        )
        trainer.fit(Numbers(), datamodule=Prepared(engine, seen))

    job = Job(work, 2)
    job.run("ab")
    assert job.sizes == [2, 3]
    assert [entry for entry in seen if entry[0] == "c"] == [
        ("c", "prepare", False),
        ("c", "setup", False),
    ]
    others = sorted(entry[:2] for entry in seen if entry[0] != "c")
    assert others in (
        [("a", "prepare"), ("a", "setup"), ("b", "setup")],
        [("a", "setup"), ("b", "prepare"), ("b", "setup")],
    )


class Noted(Numbers):
    """Notes when it is set up, and when its optimizer is made; the rate falls in each step."""

    def __init__(self, engine: ElasticThreadEngine, book: list[tuple[str, str, bool]]) -> None:
        super().__init__()
        self.__dict__.update(engine=engine, book=book)

    def setup(self, stage: str) -> None:
        """Note it."""
        self.book.append(
            (self.engine.worker, "setup", self.engine.worker in self.engine.job.assigned)
        )

    def configure_optimizers(self) -> Any:
        """Note it."""
        assert self.trainer.estimated_stepping_batches == 2 * -(-SAMPLES // 8)
        self.book.append(
            (self.engine.worker, "optimizers", self.engine.worker in self.engine.job.assigned)
        )
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
                "interval": "step",
            }
        ]


def test_a_late_rank_sets_up_its_task_before_the_others_wait_for_it(tmp_path: Path) -> None:
    """Each process sets up once and makes its optimizers once,
    and what is trained does not change.
    """
    seen: list[tuple[str, str, bool]] = []
    weights: dict[bool, Tensor] = {}

    class Grow(Callback):
        def on_train_step_end(self, trainer: RunView, task: Line) -> None:
            engine = trainer.engine
            assert isinstance(engine, ElasticThreadEngine)
            if (
                grows
                and engine.worker == "a"
                and trainer.global_step == 3
                and len(engine.job.sizes) == 1
            ):
                engine.job.add("c")

    def work(engine: ElasticThreadEngine) -> None:
        engine.ranks.joins_late = engine.worker == "c"
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        options: dict[str, Any] = dict.fromkeys(quiet, False)
        folder = str(tmp_path / str(grows))
        trainer = Trainer(
            engine=engine, max_epochs=2, run_dir=folder, callbacks=[Grow(), Elastic()], **options
        )
        task = Noted(engine, seen)
        trainer.fit(task, DataLoader(Numbered(SAMPLES), batch_size=4, shuffle=True))
        if engine.worker == "a":
            weights[grows] = torch.cat(
                [parameter.detach().flatten() for parameter in task.parameters()]
            )

    for grows in (False, True):
        seen.clear()
        job = Job(work, 2)
        job.run("ab")
        assert job.sizes == ([2, 3] if grows else [2])
    assert [entry for entry in seen if entry[0] == "c"] == [
        ("c", "setup", False),
        ("c", "optimizers", False),
    ]
    assert sorted(entry[:2] for entry in seen if entry[0] != "c") == [
        (w, what) for w in "ab" for what in ("optimizers", "setup")
    ]
    torch.testing.assert_close(weights[True], weights[False], rtol=0, atol=1e-12)


def test_ranks_are_formed_again_while_a_checkpoint_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk does not hold up a recovery:
    here it is done only once the other ranks train again.
    """
    formed, in_time = threading.Event(), list[bool]()
    write = LocalStore.write

    def slow_write(store: LocalStore, name: str, snapshot: Snapshot) -> None:
        in_time.append(formed.wait(30))
        write(store, name, snapshot)

    class Formed(Callback):
        def on_train_start(self, trainer: RunView, task: Line) -> None:
            if len(trainer.engine.job.sizes) > 1:  # type: ignore[attr-defined]
                formed.set()

    monkeypatch.setattr(LocalStore, "write", slow_write)
    save = {
        "enable_checkpointing": True,
        "make_callbacks": lambda: [
            Formed(),
            ModelCheckpoint(every_n_train_steps=2, every_n_epochs=1),
        ],
    }
    # At step 2, after which no checkpoint is due: the next save waits for the one before it.
    job, book, weights, _ = run(tmp_path, "ab", {("b", 2): lambda job: kill()}, **save)
    assert in_time and all(in_time), "the recovery waited for the disk"
    assert job.sizes == [2, 1] and set(weights) == {"a"}
    check_exactly_once(book)
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "best",
        "epoch=2-step=21",
        "last",
    ]


@pytest.mark.parametrize("during", ["start", "commit"])
def test_a_rank_lost_before_the_first_commit_changes_nothing_either(
    tmp_path: Path, undisturbed: tuple[Tensor, list[str]], during: str
) -> None:
    """The job was started with three ranks: batch and rate are those of three."""
    gone: list[str] = []

    class Early(Callback):
        def on_fit_start(self, trainer: RunView, task: Line) -> None:
            self._die(trainer, "start")

        def on_save_checkpoint(
            self, trainer: RunView, task: Line, checkpoint: dict[str, Any]
        ) -> None:
            self._die(trainer, "commit")

        def _die(self, trainer: RunView, here: str) -> None:
            if during == here and trainer.engine.worker == "b" and not gone:  # type: ignore[attr-defined]
                gone.append("b")
                raise Killed

    job, book, weights, trainer = run(tmp_path, "abc", make_callbacks=lambda: [Early()])
    assert job.sizes == [3, 2]
    assert (trainer.batch_plan.world_size, trainer.batch_plan.lr_factor) == (3, 3.0)
    check_exactly_once(book)
    for held in weights.values():
        torch.testing.assert_close(held, undisturbed[0], rtol=1e-5, atol=1e-6)


def test_a_new_job_does_not_resume_an_earlier_ones_checkpoint(tmp_path: Path) -> None:
    """Without resume=auto the folder's files are set aside, as without the callback."""
    save = {"enable_checkpointing": True, "make_callbacks": lambda: [ModelCheckpoint()]}
    run(tmp_path, "a", **save)
    _, book, _, _ = run(tmp_path, "a", **save)
    check_exactly_once(book)
    assert list((tmp_path / "run").glob("before-*/checkpoints"))


class Opened(Callback):
    """Counts the attempts of a worker that were begun and torn down."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    def on_train_start(self, trainer: RunView, task: Line) -> None:
        """Count."""
        self.begun += 1

    def teardown(self, trainer: RunView, task: Line, stage: str) -> None:
        """Count."""
        self.ended += 1


@pytest.mark.parametrize(
    ("victims", "settings"),
    [("", {}), ("", {"max_steps": 4, "limit_val_batches": 0}), ("b", {}), ("a", {})],
)
def test_a_beat_under_way_does_not_keep_a_session_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victims: str, settings: dict[str, Any]
) -> None:
    """After the loss of a rank, and at the end of training, each attempt is torn down,
    and the last leaves nothing unread.
    """
    # each round has an exchange, which is read in the next
    monkeypatch.setattr("trainkit.engine.coordinator.INTERVAL_S", 0.0)
    under_way: dict[str, int] = {}

    def start_sum(comm: ThreadCollectives, number: int) -> Callable[[], int]:
        assert isinstance(comm.ranks, ElasticThreadRanks)
        worker = comm.ranks.worker
        under_way[worker] = under_way.get(worker, 0) + 1

        def wait() -> int:
            total = comm.sum_number(number)
            under_way[worker] -= 1
            return total

        return wait

    monkeypatch.setattr(ThreadCollectives, "start_sum", start_sum)
    kept: list[Opened] = []

    def make_callbacks() -> list[Callback]:
        kept.append(Opened())
        return [kept[-1]]

    deaths = {(victim, 3): lambda job: kill() for victim in victims}
    _, _, weights, trainer = run(tmp_path, "abc", deaths, make_callbacks=make_callbacks, **settings)
    survivors = [opened for opened in kept if opened.begun == 1 + bool(victims)]
    assert len(survivors) == len(weights) == 3 - len(victims)
    assert all(opened.ended == opened.begun for opened in survivors)
    lost = 1 if victims else 0  # the exchange that a lost rank interrupted
    assert {worker: under_way[worker] for worker in weights} == dict.fromkeys(weights, lost)
    assert trainer.run.coordinator._wait is None


@pytest.mark.parametrize(("launcher", "lines"), [("horovodrun", 1), ("none", 0)])
def test_a_job_that_cannot_lose_a_rank_says_so(launcher: str, lines: int) -> None:
    """Under horovodrun without --min-np the callback does nothing; one process needs no line."""
    said: list[str] = []
    place = SimpleNamespace(heartbeat=SimpleNamespace(), launcher=SimpleNamespace(name=launcher))
    run: Any = SimpleNamespace(engine=place, elastic=None, global_step=0, say=said.append)
    Elastic().on_train_start(run, Line())
    assert len(said) == lines
    assert all("horovodrun was started without --min-np" in line for line in said)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError(), True),
        (SystemExit(7), True),
        (SystemExit("no such file"), True),
        (SystemExit(0), False),
        (SystemExit(), False),
        (Preempted("a signal"), False),
        (Dismissed("its host was removed"), False),
        (PeerError("rank 1 has gone"), False),
        (RuntimeError("DataLoader worker (pid 3) is killed by signal: Killed."), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_a_rank_that_fails_by_its_own_code_is_not_replaced(
    error: BaseException, expected: bool
) -> None:
    """sys.exit(7) is such a failure: another worker would do the same, again and again."""
    assert is_own(error) is expected
