"""Trainer: puts the pieces together and owns the standard model of data-parallel training.

The constructor takes the settings; each entry point opens a Session (session.py), which starts the engine, builds what
the loop works with, and cleans up. fit then reads: build, sanity check, loop.fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from trainkit import loop
from trainkit.arguments import IntOrFraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked
from trainkit.callback import Callback
from trainkit.callbacks.banner import Banner
from trainkit.callbacks.checkpoint import ModelCheckpoint
from trainkit.callbacks.progress import ProgressBar
from trainkit.data.module import DataModule, Stage
from trainkit.engine.base import Engine
from trainkit.errors import ConfigError
from trainkit.lightning import TRAINER_ARGUMENTS
from trainkit.loggers import CSVLogger, TensorBoardLogger
from trainkit.loggers.base import Logger
from trainkit.loop import Limits
from trainkit.optim.contract import Contract
from trainkit.session import Session
from trainkit.settings import NO_END, Settings
from trainkit.state import TrainState
from trainkit.task import Task, check_overrides


@checked
class Trainer:
    """Trains a Task on as many ranks as the launcher started.

    Args:
        engine: "auto" (by the launcher), "single", "horovod", "ddp", or an Engine.
        max_epochs: passes over the training data; this or `max_steps` is needed.
        max_steps: optimizer steps.
        global_batch_size: samples of a step on all ranks; the accumulation is derived from it.
        accumulate_grad_batches: microbatches of one rank in a step (default 1), where no `global_batch_size` is given.
        lr_scaling: how learning rates follow the global batch: "linear" (Goyal et al. 2017), "sqrt" or "none".
        lr_reference_batch_size: the global batch that the user's rates are meant for. Default: one rank's batch of a
            step, so that the factor is the number of ranks.
        lr_warmup_epochs: epochs of warm-up.
        lr_warmup_steps: steps of warm-up.
        precision: "32-true", "16-mixed", "bf16-mixed", "bf16-true" or "64-true".
        channels_last: weights and inputs of four dimensions take that memory format.
        gradient_clip_val: clip the gradients of the whole step at this.
        gradient_clip_algorithm: "norm" (over all parameters) or "value" (of each element).
        limit_train_batches: microbatches of one rank in an epoch (a count), or a share of the data (a float).
        limit_val_batches: the same for validation; 0 for none.
        limit_test_batches: the same for test.
        limit_predict_batches: the same for predict.
        val_check_interval: validate each so many steps inside an epoch; default: at its end.
        check_val_every_n_epoch: epochs between two validations.
        num_sanity_val_steps: validation batches tried before training.
        log_every_n_steps: steps between two logs of step values.
        fast_dev_run: run so many batches (true: 1) of one epoch and of validation, without files.
        callbacks: a callback or a list.
        logger: a logger or a list; true for CSV and TensorBoard, false for none.
        enable_progress_bar: show progress on rank 0.
        enable_checkpointing: write checkpoints (a ModelCheckpoint is added where `callbacks` has none); false drops those.
        enable_model_summary: print the banner on rank 0.
        deterministic: ask torch for deterministic algorithms.
        run_dir: where all files go. Default: runs/<Task>/<time>.
        seed: of order, augmentation and each rank's random numbers.
    """

    config_key = "trainer"
    explained_arguments = TRAINER_ARGUMENTS

    def __init__(
        self,
        *,
        engine: Engine | str = "auto",
        max_epochs: PositiveInt | None = None,
        max_steps: PositiveInt | None = None,
        global_batch_size: PositiveInt | None = None,
        accumulate_grad_batches: PositiveInt | None = None,
        lr_scaling: Literal["linear", "sqrt", "none"] = "linear",
        lr_reference_batch_size: PositiveInt | None = None,
        lr_warmup_epochs: NonNegativeFloat | None = None,
        lr_warmup_steps: NonNegativeInt | None = None,
        precision: Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true"] = "32-true",
        channels_last: bool = False,
        gradient_clip_val: PositiveFloat | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        limit_train_batches: IntOrFraction | None = None,
        limit_val_batches: IntOrFraction | None = None,
        limit_test_batches: IntOrFraction | None = None,
        limit_predict_batches: IntOrFraction | None = None,
        val_check_interval: PositiveInt | None = None,
        check_val_every_n_epoch: PositiveInt = 1,
        num_sanity_val_steps: NonNegativeInt = 2,
        log_every_n_steps: PositiveInt = 50,
        fast_dev_run: bool | PositiveInt = False,
        callbacks: Callback | Sequence[Callback] | None = None,
        logger: Logger | Sequence[Logger] | bool = True,
        enable_progress_bar: bool = True,
        enable_checkpointing: bool = True,
        enable_model_summary: bool = True,
        deterministic: bool = False,
        run_dir: str | None = None,
        seed: int = 0,
    ) -> None:
        quick = int(fast_dev_run)
        if quick:
            max_epochs, max_steps, num_sanity_val_steps, logger, enable_checkpointing = 1, None, 0, False, False
            val_check_interval, check_val_every_n_epoch = None, 1
            limit_train_batches = limit_val_batches = limit_test_batches = limit_predict_batches = quick
        clip = gradient_clip_val, gradient_clip_algorithm
        self.settings = Settings(
            engine=engine,
            limits=Limits(max_epochs, max_steps, log_every_n_steps, val_check_interval, check_val_every_n_epoch, *clip),
            train_limit=limit_train_batches,
            val_limit=limit_val_batches,
            test_limit=limit_test_batches,
            predict_limit=limit_predict_batches,
            global_batch_size=global_batch_size,
            accumulate=accumulate_grad_batches,
            lr_scaling=lr_scaling,
            lr_reference_batch_size=lr_reference_batch_size,
            lr_warmup_steps=lr_warmup_steps,
            lr_warmup_epochs=lr_warmup_epochs,
            precision=precision,
            channels_last=channels_last,
            num_sanity_val_steps=num_sanity_val_steps,
            deterministic=deterministic,
            run_dir=run_dir,
            seed=seed,
        )
        self.callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
        if enable_model_summary:
            self.callbacks.insert(0, Banner())
        if enable_progress_bar:
            self.callbacks.append(ProgressBar())
        loggers = [CSVLogger(), TensorBoardLogger()] if logger is True else logger or []
        self.callbacks += [loggers] if isinstance(loggers, Logger) else loggers
        if not enable_checkpointing:
            self.callbacks = [c for c in self.callbacks if not isinstance(c, ModelCheckpoint)]
        elif not any(isinstance(c, ModelCheckpoint) for c in self.callbacks):
            self.callbacks.append(ModelCheckpoint())
        if quick:
            self.callbacks = [c for c in self.callbacks if not isinstance(c, (ModelCheckpoint, Logger))]
        self.callbacks.sort(key=lambda callback: isinstance(callback, ModelCheckpoint))  # they save what the others did
        self.callback_metrics: dict[str, float] = {}
        self.config: dict[str, Any] | None = None
        self._session: Session | None = None
        self._fitted: Session | None = None

    # -- entry points -----------------------------------------------------------------------------------------------

    def fit(
        self,
        task: Task,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | None = None,
    ) -> None:
        """Train.

        Args:
            task: what to train.
            train_dataloaders: a DataLoader, a Dataset, or an iterable of batches.
            val_dataloaders: the same, or a list of DataLoaders.
            datamodule: brings both, in place of the two.
            ckpt_path: go on from this checkpoint: "last", "best" (of `run_dir`), or a folder.

        Raises:
            ConfigError: neither max_epochs nor max_steps, or settings that contradict each other.
            TaskError: the task lacks a method.
        """
        check_overrides(task, ("training_step", "configure_optimizers"))
        if self.max_epochs is None and self.max_steps is None:
            raise ConfigError(NO_END)
        with self._start(task, "fit", datamodule) as session:
            session.build(train_dataloaders, val_dataloaders, ckpt_path)
            self._fitted = session
            session.hooks("on_fit_start")
            session.sanity_check()
            loop.fit(session.run)
            session.hooks("on_fit_end")

    def validate(
        self, task: Task, dataloaders: Any = None, datamodule: DataModule | None = None, ckpt_path: str | None = None
    ) -> dict[str, float]:
        """Evaluate on the validation data; return the logged values, exact over all samples, on all ranks."""
        check_overrides(task, ("validation_step",))
        with self._start(task, "validate", datamodule) as session:
            return session.evaluate("validation", session.eval_feeds("val", dataloaders), ckpt_path)

    def test(
        self, task: Task, dataloaders: Any = None, datamodule: DataModule | None = None, ckpt_path: str | None = None
    ) -> dict[str, float]:
        """Evaluate on the test data; return the logged values, exact over all samples, on all ranks."""
        check_overrides(task, ())
        with self._start(task, "test", datamodule) as session:
            return session.evaluate("test", session.eval_feeds("test", dataloaders), ckpt_path)

    def predict(
        self, task: Task, dataloaders: Any = None, datamodule: DataModule | None = None, ckpt_path: str | None = None
    ) -> list[Any]:
        """Return what `predict_step` returned for the batches of all ranks, on the CPU, in the data's order, on all ranks."""
        check_overrides(task, ())
        with self._start(task, "predict", datamodule) as session:
            return session.predict(session.eval_feeds("predict", dataloaders), ckpt_path)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint folder. Call it on all ranks, during or after `fit`; rank 0 writes."""
        self._trained.save_checkpoint(Path(filepath), weights_only)

    def request_stop(self, reason: str) -> None:
        """End training after the current step. Call it on all ranks at the same step."""
        self.state.request_stop(reason)

    def _start(self, task: Task, stage: Stage, datamodule: DataModule | None) -> Session:
        self.callback_metrics = {}
        self._session = Session(self, task, stage, datamodule, self._session)
        return self._session

    # -- what can be asked, while something runs and after it -------------------------------------------------------

    @property
    def _running(self) -> Session:
        if self._session is None:
            raise ConfigError("The Trainer has not run yet: call fit, validate, test or predict first.")
        return self._session

    @property
    def _trained(self) -> Session:
        if self._fitted is None:
            raise ConfigError("There was no fit yet, so there is nothing trained: call fit first.")
        return self._fitted

    @property
    def state(self) -> TrainState:
        """The counters."""
        return self._running.state

    @property
    def engine(self) -> Engine:
        """The ranks."""
        return self._running.engine

    @property
    def run_dir(self) -> Path:
        """The run's folder, the same on all ranks."""
        return self._running.run_dir

    @property
    def contract(self) -> Contract:
        """The arithmetic of batch and learning rate."""
        return self._running.contract if hasattr(self._running, "contract") else self._trained.contract

    @property
    def session(self) -> Session:
        """What runs now; for callbacks that show it."""
        return self._running

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self.state.global_step

    @property
    def current_epoch(self) -> int:
        """The epoch that is going on, from 0."""
        return self.state.current_epoch

    @property
    def max_epochs(self) -> int | None:
        """The limit of epochs."""
        return self.settings.limits.max_epochs

    @property
    def max_steps(self) -> int | None:
        """The limit of steps."""
        return self.settings.limits.max_steps

    @property
    def should_stop(self) -> bool:
        """Whether training ends after the current step."""
        return self.state.should_stop

    @property
    def sanity_checking(self) -> bool:
        """Whether the few validation batches before training run now."""
        return self.state.stage == "sanity_check"

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.engine.is_main

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.engine.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.engine.world_size

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the whole run, for schedules.

        Raises:
            ConfigError: the training data has no length and max_steps is not set.
        """
        steps = self._running.total_steps
        if steps is None:
            raise ConfigError(
                "The number of steps of the run is not known: the training data has no length. Set trainer.max_steps."
            )
        return steps
