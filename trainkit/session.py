"""Session: one fit, validate, test or predict from the start of the engine to its end.

enter   engine starts, device pinned -> run folder agreed -> hooks -> data prepared and set up -> precision
build   feeds -> contract of batch and learning rate -> weights placed -> optimizers -> checkpoint, if asked ->
        rank 0's state to everyone -> each rank its own random numbers
exit    teardown; after an error, on_exception first
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from trainkit import assembly, evaluation, loop
from trainkit.checkpoint import contents
from trainkit.checkpoint.format import load, load_training
from trainkit.checkpoint.format import write as write_checkpoint
from trainkit.data.feed import Feed
from trainkit.data.loader import read_source
from trainkit.data.module import DataModule, Stage
from trainkit.data.order import mix
from trainkit.data.transfer import to_device
from trainkit.engine.base import Engine, use_deterministic_algorithms
from trainkit.engine.select import make_engine
from trainkit.errors import ConfigError
from trainkit.hooks import Hooks
from trainkit.loop import Run
from trainkit.optim.contract import Contract, derive_accumulation, derive_warmup
from trainkit.optim.schedule import LearningRates, read_optimizers
from trainkit.precision import Precision
from trainkit.run_dir import make_run_dir, set_aside
from trainkit.state import TrainState
from trainkit.task import Task

if TYPE_CHECKING:
    from trainkit.trainer import Trainer


def seed_everything(seed: int) -> int:
    """Seed random, numpy and torch (all devices) of this process; return the seed."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    return seed


class Session:
    """See the module. A context manager; `run` is there after `build`."""

    run: Run
    contract: Contract
    hooks: Hooks
    precision: Precision
    run_dir: Path

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
        self.user_lrs: list[float] = []
        self.resumed_from: Path | None = None
        self.num_validations = 0
        self.validation_names: set[str] = set()
        self._feed: Feed | None = None
        self._feeds: list[Feed] = []

    def __enter__(self) -> Session:
        self.engine.__enter__()
        self._was_deterministic = torch.are_deterministic_algorithms_enabled()
        if self.settings.deterministic:
            use_deterministic_algorithms()
        self.run_dir = self.engine.run_on_main(lambda: make_run_dir(self._folder_wish, type(self.task).__name__))
        self.task._trainer = self.trainer
        self.hooks = Hooks(self.trainer, self.task, self.trainer.callbacks)
        sources: list[Any] = [self.task] if self._datamodule is None else [self.task, self._datamodule]
        assembly.prepare_on_each_host(self.engine, [source.prepare_data for source in sources])
        if self._datamodule is not None:
            self._datamodule.setup(self.stage)
        self.hooks("setup", self.stage)
        self.precision = Precision(self.settings.precision, self.engine.device)
        self._move = assembly.mover(self.engine, self.precision, self.settings.channels_last)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.hooks("on_exception", error)
        self.hooks("teardown", self.stage)
        if self._datamodule is not None:
            self._datamodule.teardown(self.stage)
        self.task._log_target = None
        for feed in self._feeds:
            feed.close()
        torch.use_deterministic_algorithms(self._was_deterministic)
        self.engine.__exit__(kind, error, trace)

    # -- fit ----------------------------------------------------------------------------------------------------------

    def build(self, train_data: Any, val_data: Any, ckpt_path: str | None) -> None:
        """Build what the loop works with, and put it where the checkpoint left it."""
        task, engine, settings = self.task, self.engine, self.settings
        data = assembly.find_data("train", train_data, task, self._datamodule)
        if data is None:
            raise ConfigError(
                "There is no training data: pass train_dataloaders or a datamodule, or give the task a train_dataloader()."
            )
        source = read_source(data, "train_dataloaders", training=True)
        batch_size = assembly.batch_size_of(data, source)
        accumulate = derive_accumulation(batch_size, engine.world_size, settings.accumulate, settings.global_batch_size)
        feed = assembly.train_feed(data, source, accumulate, settings.train_limit, settings.seed, engine, self._move)
        self._feed = feed
        self._feeds.append(feed)
        val_feeds = self._val_feeds(val_data)
        interval = settings.limits.val_check_interval
        if val_feeds and interval and feed.num_steps is not None and interval > feed.num_steps:
            raise ConfigError(
                f"trainer.val_check_interval is {interval}, but an epoch has {feed.num_steps} steps: there would never be a "
                "validation. Use a smaller one, or null for the epoch's end."
            )
        self.contract = Contract(
            batch_size,
            engine.world_size,
            accumulate,
            settings.lr_scaling,
            settings.lr_reference_batch_size,
            derive_warmup(settings.lr_warmup_steps, settings.lr_warmup_epochs, feed.num_steps),
        )
        assembly.place(task, engine, self.precision, settings.channels_last)
        optimizers, schedules = read_optimizers(task.configure_optimizers())
        not_optimized = assembly.check_parameters(task, optimizers)
        task.zero_grad(set_to_none=True)  # what an earlier, broken-off run left would count as this one's
        rates = LearningRates(optimizers, schedules, self.contract)
        self.user_lrs = rates.user_lrs
        self.run = Run(
            task=task,
            engine=engine,
            precision=self.precision,
            optimizers=optimizers,
            rates=rates,
            feed=feed,
            limits=settings.limits,
            state=self.state,
            hooks=self.hooks,
            validate=(lambda: self._validate(val_feeds)) if val_feeds else None,
            metrics=self.trainer.callback_metrics,
            not_optimized=not_optimized,
        )
        self.prog_bar_names = self.run.log.prog_bar
        seed_everything(mix(settings.seed, engine.rank))
        if ckpt_path is not None:
            self._resume(ckpt_path)
        elif engine.is_main:
            set_aside(self.run_dir)
        engine.prepare(task, optimizers)

    def _resume(self, ckpt_path: str) -> None:
        def read() -> tuple[Path, dict[str, Any]]:
            folder = load(ckpt_path, self.run_dir, self.task)
            return folder, load_training(folder)

        self.resumed_from, saved = self.engine.run_on_main(read)
        contents.restore(self.run, self.trainer.callbacks, saved)
        self.hooks("on_load_checkpoint", saved["extra"])

    @property
    def num_training_steps(self) -> int | None:
        """Steps of an epoch, where they are known."""
        return None if self._feed is None else self._feed.num_steps

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, where they are known."""
        return None if self._feed is None else loop.planned_steps(self._feed, self.settings.limits)

    @property
    def hyperparams(self) -> dict[str, Any]:
        """What the loggers keep of the run's settings: the config, or what the Task saved."""
        return self.trainer.config or {name: value for name, value in self.task.hparams.items() if not callable(value)}

    def sanity_check(self) -> None:
        """Try a few validation batches before training, so that an error in validation does not cost an epoch."""
        limit = self.settings.num_sanity_val_steps
        if self.run.validate is None or limit == 0 or self.state.global_step:
            return
        self.hooks("on_sanity_check_start")
        self.state.stage = "sanity_check"
        feeds = self._val_feeds(None, limit)
        evaluation.evaluate("validation", self.task, feeds, self.engine, self.precision, self.hooks)
        self.hooks("on_validation_end")
        for feed in feeds:  # their workers need not live as long as the run
            self._feeds.remove(feed)
            feed.close()
        self.state.stage = "fit"
        self.hooks("on_sanity_check_end")

    def _val_feeds(self, given: Any, limit: int | None = None) -> list[Feed]:
        if limit is None:
            self._val_data = assembly.find_data("val", given, self.task, self._datamodule)
        return self._make_feeds(self._val_data, "val_dataloaders", self.settings.val_limit if limit is None else limit)

    def _validate(self, feeds: Sequence[Feed]) -> Mapping[str, float]:
        self.engine.broadcast_tensors(self.task.buffers())  # rank 0's statistics are what is evaluated and saved
        metrics, prog_bar = evaluation.evaluate("validation", self.task, feeds, self.engine, self.precision, self.hooks)
        self.prog_bar_names |= prog_bar
        self.num_validations += 1
        self.validation_names |= metrics.keys()
        self.trainer.callback_metrics.update(metrics)
        self.hooks("on_metrics", metrics, self.state.global_step)
        self.hooks("on_validation_end")
        return metrics

    @property
    def awaits_validation(self) -> bool:
        """Whether there is validation data and no validation has run yet."""
        return self.run.validate is not None and self.num_validations == 0

    def save_checkpoint(self, folder: Path, weights_only: bool) -> None:
        """See Trainer.save_checkpoint. A disk that does not take it is reported, and training goes on."""
        self.engine.broadcast_tensors(self.task.buffers())
        extra: dict[str, Any] = {}
        self.hooks("on_save_checkpoint", extra)
        training = None if weights_only else contents.gather(self.run, self.trainer.callbacks, extra)
        if not self.engine.is_main:
            return
        about: dict[str, Any] = {"epoch": self.state.current_epoch, "global_step": self.state.global_step}
        about |= {"metrics": dict(self.trainer.callback_metrics), "contract": self.contract.to_dict()}
        about |= {"versions": contents.versions(), "config": self.trainer.config}
        try:
            write_checkpoint(folder, self.task, training, about)
        except OSError as error:
            print(f"The checkpoint {folder} was NOT written: {error}. Training goes on.", flush=True)

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
        metrics, _ = evaluation.evaluate(kind, self.task, feeds, self.engine, self.precision, self.hooks)
        self.trainer.callback_metrics.update(metrics)
        self.hooks(f"on_{kind}_end")
        return metrics

    def predict(self, feeds: Sequence[Feed], ckpt_path: str | None) -> list[Any]:
        """Return the outputs of all ranks in the data's order."""
        if len(feeds) > 1:
            raise ConfigError(f"predict takes one loader, and got {len(feeds)}. Call it once for each.")
        self._load(ckpt_path)
        own: list[tuple[int, Any]] = []
        for places, outputs in evaluation.predict(self.task, feeds[0], self.precision, self.hooks):
            own.append((len(own) if places is None else places.start, to_device(outputs, torch.device("cpu"))))
        everyone = [pair for rank in self.engine.all_gather_object(own) for pair in rank]
        return [outputs for _, outputs in sorted(everyone, key=lambda pair: pair[0])]

    def _load(self, ckpt_path: str | None) -> None:
        assembly.place(self.task, self.engine, self.precision, self.settings.channels_last)  # first: loading casts
        if ckpt_path is not None:
            self.resumed_from = self.engine.run_on_main(lambda: load(ckpt_path, self.run_dir, self.task))
        self.engine.prepare(self.task, [])

    def _make_feeds(self, data: Any, name: str, limit: float | None) -> list[Feed]:
        if data is None or limit == 0:
            return []
        feeds = assembly.eval_feeds(data, name, limit, self.settings.seed, self.engine, self._move)
        self._feeds += feeds
        return feeds
