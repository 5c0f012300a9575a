"""Trainer: puts the pieces together and owns the standard model of data-parallel training.

The constructor takes the settings; each entry point opens a Session (session.py), which starts the engine, builds what
the loop works with, and cleans up. fit then reads: build, sanity check, loop.fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from trainkit import loop
from trainkit.api.callback import Callback
from trainkit.api.datamodule import DataModule, Stage
from trainkit.api.lightning_names import TRAINER_ARGUMENTS
from trainkit.api.task import Task, check_overrides
from trainkit.arguments import Duration, IntOrFraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked
from trainkit.callbacks.elastic import Elastic
from trainkit.callbacks.step_clock import StepClock
from trainkit.callbacks.timer import Timer
from trainkit.checkpoint.store import make_store
from trainkit.engine.base import Engine
from trainkit.errors import ConfigError
from trainkit.loggers.base import Logger
from trainkit.run.build import FitSession
from trainkit.run.default_callbacks import arrange
from trainkit.run.elastic import keep_going
from trainkit.run.options import NO_END, Limits, Settings
from trainkit.run.running import Running
from trainkit.run.setup import Session


@checked
class Trainer(Running):
    """Trains a Task on as many ranks as the launcher started.

    Args:
        engine: "auto" (by the launcher), "single", "horovod", "ddp", or an Engine.
        max_epochs: passes over the training data; this, `max_steps` or `max_time` is needed.
        max_steps: optimizer steps.
        max_time: of training, over all starts of the run: seconds, a timedelta, "DD:HH:MM:SS", or {hours: 2}; see Timer.
        global_batch_size: samples of a step on all ranks; the accumulation is derived from it.
        accumulate_grad_batches: microbatches of one rank in a step (default 1), where no `global_batch_size` is given; or
            {first epoch: microbatches}, as {0: 4, 10: 1}.
        lr_scaling: how learning rates follow the global batch: "linear" (Goyal et al. 2017), "sqrt" or "none".
        lr_reference_batch_size: the global batch that the user's rates are meant for. Default: one rank's batch of a
            step, so that the factor is the number of ranks.
        lr_warmup_epochs: epochs of warm-up.
        lr_warmup_steps: steps of warm-up.
        lr_momentum_correction: true lets SGD's momentum follow a rate that changes, as torch does; see optim/schedule.py.
        precision: "32-true", "16-mixed", "bf16-mixed", "bf16-true" or "64-true".
        channels_last: weights and inputs of four dimensions take that memory format; "auto": on a GPU, where it pays.
        compile: true, or a mode of torch.compile ("reduce-overhead", ...), for each module of the task; see compiling.py.
        sync_batchnorm: batch norm's statistics are those of all ranks' microbatches.
        halve_batch_on_oom: where a GPU's memory does not hold a microbatch, all ranks split theirs and take the step anew.
        gradient_clip_val: clip the gradients of the whole step at this.
        gradient_clip_algorithm: "norm" (over all parameters) or "value" (of each element).
        pad_last_step: fill a short last step of an epoch with the epoch's first samples, which then count twice. Default:
            it is short, and weighted as such.
        limit_train_batches: microbatches of one rank in an epoch (a count), or a share of the data (a float).
        limit_val_batches: the same for validation; 0 for none.
        limit_test_batches: the same for test.
        limit_predict_batches: the same for predict.
        val_check_interval: validate each so many steps inside an epoch; default: at its end.
        check_val_every_n_epoch: epochs between two validations.
        num_sanity_val_steps: validation batches tried before training.
        log_every_n_steps: steps between two logs of step values.
        overfit_batches: train again and again on so many batches, unshuffled (a count or a share); validation takes as many.
        fast_dev_run: run so many batches (true: 1) of one epoch and of validation, without files.
        callbacks: a callback or a list.
        logger: a logger or a list; true for CSV and TensorBoard, false for none.
        enable_progress_bar: show progress on rank 0 (a ProgressBar is added where `callbacks` has none); false drops it.
        enable_checkpointing: write checkpoints (a ModelCheckpoint is added where `callbacks` has none); false drops those.
        enable_model_summary: print the banner on rank 0.
        profiler: "simple" (time by hook and part of a step), "pytorch" (by operator), or a callback; see callbacks/profiler.py.
        deterministic: ask torch for deterministic algorithms.
        benchmark: let cuDNN try out which algorithm is the fastest for each shape.
        detect_anomaly: let autograd name the operation whose backward gave NaN; slow.
        stop_on_nonfinite: end the run before the update where a loss is not finite; waits for the device in each step.
        assert_no_sync: end the run where a step reads a value off the device.
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
        max_time: Duration | None = None,
        global_batch_size: PositiveInt | None = None,
        accumulate_grad_batches: PositiveInt | dict[NonNegativeInt, PositiveInt] | None = None,
        lr_scaling: Literal["linear", "sqrt", "none"] = "linear",
        lr_reference_batch_size: PositiveInt | None = None,
        lr_warmup_epochs: NonNegativeFloat | None = None,
        lr_warmup_steps: NonNegativeInt | None = None,
        lr_momentum_correction: bool = True,
        precision: Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true"] = "32-true",
        channels_last: bool | Literal["auto"] = False,
        compile: bool | Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = False,  # noqa: A002
        sync_batchnorm: bool = False,
        halve_batch_on_oom: bool = False,
        gradient_clip_val: PositiveFloat | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        pad_last_step: bool = False,
        limit_train_batches: IntOrFraction | None = None,
        limit_val_batches: IntOrFraction | None = None,
        limit_test_batches: IntOrFraction | None = None,
        limit_predict_batches: IntOrFraction | None = None,
        val_check_interval: PositiveInt | None = None,
        check_val_every_n_epoch: PositiveInt = 1,
        num_sanity_val_steps: NonNegativeInt = 2,
        log_every_n_steps: PositiveInt = 50,
        overfit_batches: IntOrFraction | None = None,
        fast_dev_run: bool | PositiveInt = False,
        callbacks: Callback | Sequence[Callback] | None = None,
        logger: Logger | Sequence[Logger] | bool = True,
        enable_progress_bar: bool = True,
        enable_checkpointing: bool = True,
        enable_model_summary: bool = True,
        profiler: Literal["simple", "pytorch"] | Callback | None = None,
        deterministic: bool = False,
        benchmark: bool = False,
        detect_anomaly: bool = False,
        stop_on_nonfinite: bool = False,
        assert_no_sync: bool = False,
        run_dir: str | None = None,
        seed: int = 0,
    ) -> None:
        if overfit_batches is not None:
            if not overfit_batches or (limit_train_batches, limit_val_batches) != (None, None):
                why = "nothing would be left" if not overfit_batches else "limit_train_batches or limit_val_batches is set too"
                raise ConfigError(f"trainer.overfit_batches is {overfit_batches}, but {why}. Leave one out (null is for all).")
            limit_train_batches = limit_val_batches = overfit_batches
        quick = int(fast_dev_run)
        if quick:
            max_epochs, max_steps, num_sanity_val_steps, logger, enable_checkpointing = 1, None, 0, False, False
            max_time = None
            val_check_interval, check_val_every_n_epoch = None, 1
            limit_train_batches = limit_val_batches = limit_test_batches = limit_predict_batches = quick
        clip = gradient_clip_val, gradient_clip_algorithm
        self.settings = Settings(
            engine=engine,
            limits=Limits(max_epochs, max_steps, log_every_n_steps, val_check_interval, check_val_every_n_epoch, *clip),
            pad=pad_last_step,
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
            lr_momentum_correction=lr_momentum_correction,
            precision=precision,
            channels_last=channels_last,
            compile=compile,
            sync_batchnorm=sync_batchnorm,
            halve_batch_on_oom=halve_batch_on_oom,
            overfit=overfit_batches is not None,
            num_sanity_val_steps=num_sanity_val_steps,
            deterministic=deterministic,
            benchmark=benchmark,
            detect_anomaly=detect_anomaly,
            stop_on_nonfinite=stop_on_nonfinite,
            assert_no_sync=assert_no_sync,
            run_dir=run_dir,
            seed=seed,
        )
        self.fast_dev_run = quick
        self.step_clock = StepClock()
        self.callbacks = arrange(
            [callbacks] if isinstance(callbacks, Callback) else list(callbacks or []),
            [logger] if isinstance(logger, Logger) else logger if isinstance(logger, bool) else list(logger),
            self.step_clock,
            max_time=max_time,
            profiler=profiler,
            shows_banner=enable_model_summary,
            shows_progress=enable_progress_bar,
            saves=enable_checkpointing,
            leaves_no_files=bool(quick),
        )
        self.callback_metrics: dict[str, float] = {}
        self.config: dict[str, Any] | None = None
        self._session: Session | None = None
        self._fitted: FitSession | None = None

    # -- entry points -----------------------------------------------------------------------------------------------

    def fit(
        self,
        task: Task,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | None = None,
        init_weights: str | None = None,
        strict: bool = True,
    ) -> None:
        """Train.

        Args:
            task: what to train.
            train_dataloaders: a DataLoader, a Dataset, or an iterable of batches.
            val_dataloaders: the same, or a list of DataLoaders.
            datamodule: brings both, in place of the two.
            ckpt_path: go on from this checkpoint: "last" (the newest that is whole) or "best" of `run_dir`, "auto" (the last
                one, or from the start where there is none), a folder, or an fsspec URL.
            init_weights: start from these weights alone: a checkpoint's folder, a .safetensors file, a state dict (.pt,
                .pth), or a Lightning checkpoint (.ckpt). A checkpoint to go on from wins.
            strict: whether all of `init_weights` must fit; false loads what fits, and lists the rest.

        Raises:
            Preempted: SIGTERM, SIGUSR1 or SIGINT came to a rank; a checkpoint is there. Uncaught it ends the process with 75.
            ConfigError: none of max_epochs, max_steps and max_time, or settings that contradict each other.
            TaskError: the task lacks a method.
        """
        check_overrides(task, ("training_step", "configure_optimizers"))
        timed = any(isinstance(callback, Timer) and callback.duration_s is not None for callback in self.callbacks)
        if self.max_epochs is None and self.max_steps is None and not timed:
            raise ConfigError(NO_END)

        def fit() -> None:
            with self.open(task, datamodule) as session:
                if not session.engine.ranks.takes_part:
                    return
                session.build(train_dataloaders, val_dataloaders, ckpt_path, init_weights, strict)
                self._fitted = session
                session.hooks("on_fit_start")
                session.sanity_check()
                with session.signals:
                    loop.fit(session.run)
                    session.finish_writing()
                session.hooks("on_fit_end")

        keep_going(next((c for c in self.callbacks if isinstance(c, Elastic)), None), fit, lambda: self.session)

    def validate(
        self, task: Task, dataloaders: Any = None, datamodule: DataModule | None = None, ckpt_path: str | None = None
    ) -> dict[str, float]:
        """Evaluate on the validation data; return the logged values, exact over all samples, on all ranks."""
        check_overrides(task, ("validation_step",))
        with self._start(task, "validate", datamodule) as session:
            if not session.engine.ranks.takes_part:
                return {}
            return session.evaluate("validation", session.eval_feeds("val", dataloaders), ckpt_path)

    def test(
        self, task: Task, dataloaders: Any = None, datamodule: DataModule | None = None, ckpt_path: str | None = None
    ) -> dict[str, float]:
        """Evaluate on the test data; return the logged values, exact over all samples, on all ranks."""
        check_overrides(task, ())
        with self._start(task, "test", datamodule) as session:
            if not session.engine.ranks.takes_part:
                return {}
            return session.evaluate("test", session.eval_feeds("test", dataloaders), ckpt_path)

    def predict(
        self,
        task: Task,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool = True,
        ckpt_path: str | None = None,
        write_to: str | Path | bool = False,
    ) -> list[Any] | None:
        """Return what `predict_step` returned for the batches of all ranks, on the CPU, in the data's order, on all ranks.

        Args:
            task: what predicts.
            dataloaders: as in `fit`; one.
            datamodule: brings it, in place of `dataloaders`.
            return_predictions: false returns None and keeps nothing in memory.
            ckpt_path: the weights to load.
            write_to: a folder for the batches, each written when it is there; true for `predictions` in the run's folder.
                `trainkit.read_predictions` reads them.
        """
        check_overrides(task, ())
        with self._start(task, "predict", datamodule) as session:
            if not session.engine.ranks.takes_part:
                return None
            own = session.run_dir / "predictions" if write_to is True else Path(write_to) if write_to else None
            return session.predict(session.eval_feeds("predict", dataloaders), ckpt_path, own, return_predictions)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint folder (or fsspec URL), and wait for it. Call it on all ranks, during or after `fit`."""
        if self.engine.ranks.takes_part:
            text = str(filepath) if "://" in str(filepath) else str(Path(filepath).absolute())
            place, _, name = text.rpartition("/")
            self._trained.save_checkpoint(make_store(place), name, weights_only)
            self._trained.finish_writing()

    def request_stop(self, reason: str) -> None:
        """End training after the current step. Call it on all ranks at the same step."""
        self.state.request_stop(reason)

    def open(self, task: Task, datamodule: DataModule | None = None) -> FitSession:
        """Return the session of a fit, not yet started; for what looks into a fit without training."""
        self.callback_metrics = {}
        self._session = session = FitSession(self, task, "fit", datamodule, self._session)
        return session

    def _start(self, task: Task, stage: Stage, datamodule: DataModule | None) -> Session:
        self.callback_metrics = {}
        self._session = Session(self, task, stage, datamodule, self._session)
        return self._session
