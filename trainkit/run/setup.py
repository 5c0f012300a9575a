"""Session: one validate, test or predict from the start of the engine to its end; and what fit shares with them.

enter   engine starts, device pinned -> run folder agreed -> hooks -> data prepared and set up -> precision
exit    teardown; after an error, on_exception first

A fit is a FitSession (fitting.py): it adds `build`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from trainkit.api.datamodule import DataModule, Stage
from trainkit.api.dispatch import Hooks
from trainkit.api.state import TrainState
from trainkit.api.task import Task
from trainkit.callbacks.checkpoint import keepers
from trainkit.checkpoint.find import load
from trainkit.checkpoint.store import Store, make_store
from trainkit.checkpoint.weights import load_into, read_weights
from trainkit.data.feed import Feed
from trainkit.device.precision import Precision
from trainkit.device.torch_flags import memory_kept, torch_switches
from trainkit.device.transfer import to_device
from trainkit.engine.base import Engine
from trainkit.engine.select import make_engine
from trainkit.errors import CheckpointError, ConfigError, Preempted
from trainkit.metrics.objects import reset_metrics
from trainkit.run import evaluation
from trainkit.run import feeds as assembly
from trainkit.run.compile import compiled
from trainkit.run.folder import job_started, make_run_dir
from trainkit.run.lock import one_at_a_time
from trainkit.run.predictions import clear_predictions, write_prediction

if TYPE_CHECKING:
    from trainkit.trainer import Trainer


def seed_everything(seed: int) -> int:
    """Seed random, numpy and torch (all devices) of this process; return the seed."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    return seed


class Session:
    """See the module. A context manager."""

    hooks: Hooks
    precision: Precision
    run_dir: Path
    declared_ranks: int | None = None  # that limits are meant for, where it is not as many as there are
    _stays = False  # whether a later session of this process goes on with the Task and its data as they are

    def __init__(
        self, trainer: Trainer, task: Task, stage: Stage, datamodule: DataModule | None, earlier: Session | None
    ) -> None:
        """Make the engine; nothing starts yet. An evaluation goes on in the folder of the `earlier` session."""
        self.trainer, self.task, self.stage, self._datamodule = trainer, task, stage, datamodule
        self.settings = trainer.settings
        self._folder_wish: str | Path | None = self.settings.run_dir
        if self._folder_wish is None and earlier is not None and stage != "fit":
            self._folder_wish = getattr(earlier, "run_dir", None)
        wish = self.settings.engine
        self.engine = wish if isinstance(wish, Engine) else make_engine(wish)  # type: ignore[arg-type]
        self.state = TrainState(stage=stage)
        self.prog_bar_names: set[str] = set()
        self.resumed_from: str | None = None
        self._feeds: list[Feed] = []
        self.num_eval_batches: int | None = None  # of this rank in a validation, test or prediction, where they are known
        self._stack = contextlib.ExitStack()
        self._has_data = False

    def __enter__(self) -> Session:
        self._begin_stage()
        self.engine.__enter__()
        try:
            if self.engine.ranks.takes_part:
                self._set_up()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _set_up(self) -> None:
        settings = self.settings
        self._stack.enter_context(torch_switches(settings.deterministic, settings.benchmark, settings.detect_anomaly))
        if self.engine.device.type == "cpu":
            self._stack.enter_context(memory_kept())
        self.run_dir = self.engine.comm.run_on_main(lambda: make_run_dir(self._folder_wish, type(self.task).__name__))
        self._claim()
        self.task._trainer = self.trainer
        self.hooks = Hooks(self.trainer, self.task, self.trainer.callbacks)
        sources: list[Any] = [self.task] if self._datamodule is None else [self.task, self._datamodule]
        prepares = [] if self._goes_on_here or self._has_data else [source.prepare_data for source in sources]
        assembly.prepare_on_each_host(self.engine, prepares)
        if self._goes_on_here:
            self.hooks.of_callbacks("setup", self.stage)
        else:
            if self._datamodule is not None and not self._has_data:
                self._datamodule.setup(self.stage)
            self.hooks("setup", self.stage)
        reset_metrics(self.task)  # what a run that was broken off has counted is not this one's
        self._stack.enter_context(compiled(self.task, settings.compile))
        self.precision = Precision(settings.precision, self.engine.device)
        self._move = assembly.mover(self.engine, self.precision, self.channels_last)

    def _begin_stage(self) -> None:
        self.engine.ranks.begin(self.stage)
        if self.engine.ranks.joins_late:
            self._prepare_before_others_wait()

    def _prepare_before_others_wait(self) -> None:
        """Prepare and set up the data, which may take long; of several processes of this host one after the other."""
        self.task._trainer = self.trainer
        sources: list[Any] = [self.task] if self._datamodule is None else [self.task, self._datamodule]
        with one_at_a_time(f"prepare-{job_started()}"):
            for source in sources:
                source.prepare_data()
        if self._datamodule is not None:
            self._datamodule.setup(self.stage)
        self._has_data = True

    def _claim(self) -> None:
        """Have the run's folder for oneself; only a fit needs that."""

    @property
    def _goes_on_here(self) -> bool:
        """Whether an earlier session of this process has set up the Task and its data, and this one goes on with them."""
        return False

    def _is_orderly(self, error: BaseException | None) -> bool:
        """Whether a session that ends with this has not failed."""
        return isinstance(error, Preempted)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_orderly(error):
            kind = error = trace = None
        try:
            if self.engine.ranks.takes_part:
                self._tear_down(error)
        finally:
            for feed in self._feeds:
                feed.close()
            self._stack.close()
            self.engine.__exit__(kind, error, trace)

    def _tear_down(self, error: BaseException | None) -> None:
        if error is not None:
            self.hooks("on_exception", error)
        self.task._log_to(None)
        if self._stays:
            self.hooks.of_callbacks("teardown", self.stage)
            return
        self.hooks("teardown", self.stage)
        if self._datamodule is not None:
            self._datamodule.teardown(self.stage)

    @property
    def channels_last(self) -> bool:
        """Whether weights and inputs of four dimensions take that memory format on this rank's device."""
        wish = self.settings.channels_last
        return self.engine.device.type == "cuda" if wish == "auto" else wish

    @property
    def hyperparams(self) -> dict[str, Any]:
        """What the loggers keep of the run's settings: the config, or what the Task saved."""
        return self.trainer.config or {name: value for name, value in self.task.hparams.items() if not callable(value)}

    def tell(self, text: str) -> None:
        """Say something on rank 0."""
        if self.engine.ranks.is_main:
            print(text, flush=True)

    # -- validate, test, predict --------------------------------------------------------------------------------------

    def eval_feeds(self, kind: Literal["val", "test", "predict"], given: Any) -> list[Feed]:
        """Return the feeds to evaluate on.

        Raises:
            ConfigError: there is no such data.
        """
        data = assembly.find_data(kind, given, self.task, self._datamodule)
        limits = {
            "val": self.settings.val_limit,
            "test": self.settings.test_limit,
            "predict": self.settings.predict_limit,
        }
        feeds = self._make_feeds(data, f"{kind}_dataloaders", limits[kind])
        if not feeds:
            raise ConfigError(f"There is no data to {self.stage} on: pass dataloaders, or define {kind}_dataloader().")
        return feeds

    def evaluate(self, kind: Literal["validation", "test"], feeds: Sequence[Feed], ckpt_path: str | None) -> dict[str, float]:
        """Evaluate and return the values."""
        self._load(ckpt_path)
        self._count_batches(feeds)
        metrics, _ = evaluation.evaluate(kind, self.task, feeds, self.engine, self.precision, self.hooks)
        self.trainer.callback_metrics.update(metrics)
        self.hooks(f"on_{kind}_end")
        return metrics

    def _count_batches(self, feeds: Sequence[Feed]) -> None:
        counts = [feed.num_steps_in(0) for feed in feeds]
        self.num_eval_batches = None if None in counts else sum(filter(None, counts))

    def predict(self, feeds: Sequence[Feed], ckpt_path: str | None, write_to: Path | None, keep: bool) -> list[Any] | None:
        """Predict; write each batch when it is there, where asked; return all ranks' outputs in the data's order."""
        if len(feeds) > 1:
            raise ConfigError(f"predict takes one loader, and got {len(feeds)}. Call it once for each.")
        self._load(ckpt_path)
        self._count_batches(feeds)
        if write_to is not None:
            self.engine.comm.run_on_main(lambda: clear_predictions(write_to))
        own: list[tuple[int, Any]] = []
        for i, (places, outputs) in enumerate(evaluation.predict(self.task, feeds[0], self.precision, self.hooks)):
            place, on_cpu = i if places is None else places.start, to_device(outputs, torch.device("cpu"))
            if write_to is not None:
                write_prediction(write_to, place, self.engine.ranks.rank, on_cpu)
            if keep:
                own.append((place, on_cpu))
        if not keep:
            self.engine.comm.barrier()  # all files are there
            return None
        everyone = [pair for rank in self.engine.comm.all_gather_object(own) for pair in rank]
        return [outputs for _, outputs in sorted(everyone, key=lambda pair: pair[0])]

    def _load(self, ckpt_path: str | None) -> None:
        assembly.place(self.task, self.engine, self.precision, self.channels_last)  # first: loading casts
        if ckpt_path is not None:
            self.resumed_from = self.engine.comm.run_on_main(lambda: self._read(ckpt_path))
        self.engine.prepare(self.task, [])

    def _read(self, ckpt_path: str) -> str:
        """Rank 0: load the weights of a checkpoint of ours, or of a file of weights."""
        if Path(ckpt_path).is_file():
            load_into(self.task, read_weights(ckpt_path), ckpt_path)
            return ckpt_path
        found = load(ckpt_path, self.stores, self.task, False, self.tell)
        if found is None:
            raise CheckpointError(f"ckpt_path is '{ckpt_path}', and there is no checkpoint in {self.stores[0].place}.")
        return found.path

    @property
    def stores(self) -> list[Store]:
        """Where this run's checkpoints lie."""
        stores = [keeper.store for keeper in keepers(self.trainer.callbacks)]
        own = make_store(self.run_dir / "checkpoints")
        return stores if own.place in [store.place for store in stores] else [*stores, own]

    def _make_feeds(self, data: Any, name: str, limit: float | None) -> list[Feed]:
        if data is None or limit == 0:
            return []
        feeds = assembly.eval_feeds(data, name, limit, self.settings.seed, self.engine, self._move, self.declared_ranks)
        self._feeds += feeds
        return feeds
