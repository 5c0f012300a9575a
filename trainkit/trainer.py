"""Trainer: the settings of training, and its entry points.

The constructor takes the settings; each entry point opens a Stage (run/setup.py), which starts the
engine and cleans up. A fit then reads: build_run, sanity check, loop.fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from trainkit import loop
from trainkit.api.callback import Callback
from trainkit.api.datamodule import DataModule, StageName
from trainkit.api.entry_points import checked_calls
from trainkit.api.lightning_arguments import TRAINER_TAKES
from trainkit.api.lightning_names import TRAINER_ARGUMENTS
from trainkit.api.options import canonical, read_options
from trainkit.api.task import Task, check_overrides
from trainkit.api.view import elastic_of
from trainkit.arguments import (
    Duration,
    IntOrFraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Seed,
    ShortPrecision,
    checked,
)
from trainkit.console import short
from trainkit.engine.base import Engine
from trainkit.engine.step_settings import Communication
from trainkit.errors import ConfigError
from trainkit.launch.reported import report_uncaught_once
from trainkit.loggers.base import Logger
from trainkit.metrics.latest import EvaluationValues
from trainkit.run.around_fit import RequestedFit, in_force
from trainkit.run.build import StartFrom, build_evaluator, build_run
from trainkit.run.data_sources import DataSources
from trainkit.run.default_callbacks import callbacks_with, default_callbacks
from trainkit.run.elastic import ElasticState
from trainkit.run.last_run import LastRun
from trainkit.run.prediction_table import TableFormat
from trainkit.run.progress_writer import writing_progress
from trainkit.run.setup import Stage


@checked
@checked_calls("fit", "validate", "test", "predict", "save_checkpoint")
class Trainer(LastRun):
    """Trains a Task on as many ranks as the launcher started.

    Args:
        engine: "auto" (by the launcher), "single", "horovod", "ddp", "fsdp", "deepspeed", or an
            Engine.
        communication: what travels between ranks: "exact", "powersgd", "local_sgd", "diloco", or
            PowerSGD(...), LocalSGD(...), DiLoCo(...) with settings.
        max_epochs: passes over the training data; this, `max_steps` or `max_time` is needed. -1:
            until a stop is requested.
        max_steps: optimizer steps; -1 for no limit.
        min_epochs: epochs that a requested stop (EarlyStopping, `request_stop`) waits for; limits
            do not.
        min_steps: the same in steps.
        max_time: of training, over all starts of the run: seconds, a timedelta, "DD:HH:MM:SS", or
            {hours: 2}; see Timer.
        global_batch_size: samples of a step on all ranks; the accumulation is derived from it.
        accumulate_grad_batches: microbatches of one rank in a step (default 1), if
            `global_batch_size` is not given; or {first epoch: microbatches}, as {0: 4, 10: 1}.
        lr_scaling: how learning rates follow the global batch: "linear" (Goyal et al. 2017), "sqrt"
            or "none".
        lr_reference_batch_size: the global batch that the user's rates are meant for. Default: one
            rank's batch of a step; the factor is then the number of ranks.
        lr_warmup_epochs: epochs of warm-up.
        lr_warmup_steps: steps of warm-up.
        lr_momentum_correction: true: SGD's momentum follows a changing rate, as in torch; see
            optim/schedule.py.
        precision: "32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true" or "fp8-mixed"; 32,
            16, "bf16" and 64 are the first of each.
        channels_last: use that memory format for four-dimensional weights and inputs; "auto": on a
            GPU, where it is faster.
        compile: true, or a mode of torch.compile ("reduce-overhead", ...), for each module of the
            task; "blocks": its repeated blocks alone; see run/compile.py.
        sync_batchnorm: compute batch norm's statistics over all ranks' microbatches.
        activation_checkpointing: compute the activations of repeated blocks again in backward, in
            place of keeping them; or of the modules or classes of these names.
        halve_batch_on_oom: if a microbatch exceeds a GPU's memory, all ranks split theirs and retry
            the step.
        gradient_clip_val: clip the gradients of the whole step at this; 0 for not.
        gradient_clip_algorithm: "norm" (over all parameters) or "value" (of each element).
        pad_last_step: fill a short last step of an epoch with the epoch's first samples, which then
            count twice. Default: weight it by its samples.
        rank_shares: shares of each step's samples, one whole number for each rank, as [3, 1] for a
            first rank that is three times as fast. Gradient, order and global batch stay; a rank's
            microbatch is larger or smaller than the batch size.
        limit_train_batches: microbatches of one rank in an epoch (a count), or a share of the data
            (a float).
        limit_val_batches: the same for validation; 0 for none.
        limit_test_batches: the same for test.
        limit_predict_batches: the same for predict.
        on_bad_sample: a sample that cannot be loaded ends the run ("raise"), or is left out of its
            batch and reported ("skip"); see data/bad_samples.py. `python -m trainkit data check`
            finds them beforehand.
        on_bad_sample_limit: different samples that may be skipped. Default: 100.
        reload_dataloaders_every_n_epochs: call train_dataloader and val_dataloader again before
            each nth epoch; they may ask `self.trainer.current_epoch`. 0: once, before training.
        val_check_interval: steps between two validations inside an epoch, or a share of it (0.25).
            Default: at its end.
        check_val_every_n_epoch: epochs between two validations; None: `val_check_interval` counts
            steps across epochs.
        num_sanity_val_steps: validation batches tried before training; -1 for all.
        log_every_n_steps: steps between two logs of step values.
        overfit_batches: train repeatedly on this many batches, unshuffled (a count or a share), of
            several loaders or a stream on those of its first epoch; limits validation too.
        fast_dev_run: run this many batches (true: 1) of one epoch and of validation, without
            checkpoints and loggers.
        callbacks: a callback or a list.
        logger: a logger or a list; true or null for CSV and TensorBoard, false for none.
        enable_progress_bar: show progress on rank 0 (adds a ProgressBar if `callbacks` has none);
            false removes it.
        enable_checkpointing: write checkpoints (adds a ModelCheckpoint if `callbacks` has none);
            false removes it.
        enable_model_summary: print the banner on rank 0. False leaves one line, if rates are scaled.
        profiler: time "simple" (by hook and part of a step), "advanced" (by function), "pytorch"
            (by operator); or a callback.
        deterministic: ask torch for deterministic algorithms; "warn": an operation without one
            warns.
        benchmark: let cuDNN search the fastest algorithm for each shape.
        float32_matmul_precision: torch.set_float32_matmul_precision during the run: with "high" a
            GPU's tensor cores multiply float32 matrices rounded to TF32.
        detect_anomaly: let autograd name the operation that gave NaN in backward; slow.
        stop_on_nonfinite: end the run before the update if a loss is not finite; waits for the
            device in each step.
        assert_no_sync: end the run if a step reads a value off the device.
        run_dir: folder of all files. Default: runs/<Task>/<time>.
        seed: of order, augmentation and each rank's random numbers; by default that of
            trainkit.seed_everything, or 0.
    """

    config_key = "trainer"
    explained_arguments = TRAINER_ARGUMENTS
    taken_arguments = TRAINER_TAKES

    def __init__(
        self,
        *,
        engine: Engine | str = "auto",
        communication: Communication | str = "exact",
        max_epochs: NonNegativeInt | Literal[-1] | None = None,
        max_steps: PositiveInt | Literal[-1] | None = None,
        min_epochs: NonNegativeInt | None = None,
        min_steps: NonNegativeInt | None = None,
        max_time: Duration | None = None,
        global_batch_size: PositiveInt | None = None,
        accumulate_grad_batches: PositiveInt | dict[NonNegativeInt, PositiveInt] | None = None,
        lr_scaling: Literal["linear", "sqrt", "none"] = "linear",
        lr_reference_batch_size: PositiveInt | None = None,
        lr_warmup_epochs: NonNegativeFloat | None = None,
        lr_warmup_steps: NonNegativeInt | None = None,
        lr_momentum_correction: bool = True,
        precision: (
            Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true", "fp8-mixed"]
            | ShortPrecision
            | None
        ) = "32-true",
        channels_last: bool | Literal["auto"] = False,
        compile: (  # noqa: A002
            bool
            | Literal[
                "default",
                "blocks",
                "reduce-overhead",
                "max-autotune",
                "max-autotune-no-cudagraphs",
            ]
        ) = False,
        sync_batchnorm: bool = False,
        halve_batch_on_oom: bool = False,
        activation_checkpointing: bool | list[str] = False,
        gradient_clip_val: NonNegativeFloat | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        pad_last_step: bool = False,
        rank_shares: list[int] | None = None,
        limit_train_batches: IntOrFraction | None = None,
        limit_val_batches: IntOrFraction | None = None,
        limit_test_batches: IntOrFraction | None = None,
        limit_predict_batches: IntOrFraction | None = None,
        on_bad_sample: Literal["raise", "skip"] = "raise",
        on_bad_sample_limit: PositiveInt | None = None,
        reload_dataloaders_every_n_epochs: NonNegativeInt = 0,
        val_check_interval: IntOrFraction | None = None,
        check_val_every_n_epoch: PositiveInt | None = 1,
        num_sanity_val_steps: NonNegativeInt | Literal[-1] | None = 2,
        log_every_n_steps: PositiveInt | None = 50,
        overfit_batches: IntOrFraction | None = None,
        fast_dev_run: bool | PositiveInt = False,
        callbacks: Callback | Sequence[Callback] | None = None,
        logger: Logger | Sequence[Logger] | bool | None = True,
        enable_progress_bar: bool | None = True,
        enable_checkpointing: bool | None = True,
        enable_model_summary: bool | None = True,
        profiler: Literal["simple", "advanced", "pytorch"] | Callback | None = None,
        deterministic: bool | Literal["warn"] | None = False,
        benchmark: bool | None = False,
        float32_matmul_precision: Literal["highest", "high", "medium"] | None = None,
        detect_anomaly: bool = False,
        stop_on_nonfinite: bool = False,
        assert_no_sync: bool = False,
        run_dir: str | None = None,
        seed: Seed | None = None,
    ) -> None:
        given = dict(locals())
        self._around = in_force()
        given = canonical(given if self._around is None else self._around.settings(given))
        self.options = read_options(given)
        self.callbacks: list[Callback] = default_callbacks(given)

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
    ) -> list[dict[str, float]]:
        """Train; return the history, on all ranks: for each epoch "epoch", "step", "lr" and the
        logged epoch values.

        Args:
            task: the Task to train.
            train_dataloaders: a DataLoader, a Dataset, or an iterable of batches.
            val_dataloaders: the same, or a list of DataLoaders.
            datamodule: provides both, in place of the two.
            ckpt_path: resume from this checkpoint: "last" (the newest complete one) or "best" of
                `run_dir`, "auto" (the last one, or a new run if there is none; "auto:PATH": or
                else PATH), a folder, or an fsspec URL.
            init_weights: start from these weights only: a checkpoint's folder, a .safetensors file,
                a folder of transformers, a state dict (.pt, .pth), or a Lightning checkpoint
                (.ckpt); Task.translate_weights may rename them. Ignored if a checkpoint is resumed.
            strict: whether all of `init_weights` must match; false loads the matching ones and
                lists the rest.

        Raises:
            Preempted: a rank received SIGTERM, SIGUSR1 or SIGINT; a checkpoint is written.
                Uncaught, the exit code is 75.
            ConfigError: none of max_epochs, max_steps and max_time, or settings that contradict
                each other.
            TaskError: the task lacks a method.
        """
        check_overrides(task, ("training_step", "configure_optimizers"))
        if not (
            self.options.limits.is_known or any(callback.ends_run for callback in self.callbacks)
        ):
            raise ConfigError(
                "None of trainer.max_epochs, trainer.max_steps and trainer.max_time is set:"
                " training would never end. Set one of them, or trainer.max_epochs=-1 to train"
                " until a stop is requested."
            )
        if self._fitted is not None:
            self._fitted.say(
                "This Trainer has run a fit before; this one is a new run, from epoch 0 and step 0."
            )
        data = DataSources({"train": train_dataloaders, "val": val_dataloaders}, datamodule)
        start = StartFrom(ckpt_path, init_weights, strict)
        fit_once = partial(self._fit_once, task, data)
        elastic = elastic_of(callbacks_with(self.callbacks, task.configure_callbacks()))
        train = fit_once if elastic is None else lambda start: elastic.fit(partial(fit_once, start))
        if self._around is None:
            train(start)
        else:
            requested = RequestedFit(task, data, start, self.options, self.callbacks)
            self._around.fit(requested, train)
        return [] if self._run is None else list(self._run.callback_metrics.history)

    def _fit_once(
        self, task: Task, data: DataSources, start: StartFrom, elastic: ElasticState | None = None
    ) -> None:
        with self._open("fit", task, data, elastic) as stage:
            if not stage.engine.ranks.takes_part:
                return
            self._fitted = run = build_run(stage, start)
            run.hooks("on_fit_start")
            if run.checkpoints.opened is not None:
                run.checkpoints.opened.close()
            run.evaluator.sanity_check()
            with run.stopping, writing_progress(run):
                loop.fit(run)
                run.checkpoints.finish()
                run.checkpoints.require_one()
            run.hooks("on_fit_end")

    def _open(
        self, kind: StageName, task: Task, data: DataSources, elastic: ElasticState | None = None
    ) -> Stage:
        """Return the stage of an entry point, not entered;
        an evaluation continues in the folder of the run before it.
        """
        options, earlier = self.options, self._run
        if kind != "fit" and options.run_dir is None and earlier is not None:
            options = replace(options, run_dir=str(earlier.run_dir))
        callbacks = callbacks_with(self.callbacks, task.configure_callbacks())
        self._stage = Stage(kind, task, data, callbacks, options, elastic)
        if kind != "fit" and self._fitted is not None:
            self._stage.state.follow(self._fitted.state)
        return self._stage

    def validate(
        self,
        task: Task | None = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
    ) -> EvaluationValues:
        """Evaluate on the validation data; return the logged values, exact over all samples, on all
        ranks.

        Without a task: that of the last fit, with the weights of its best checkpoint. `verbose`
        prints the values on rank 0.
        """
        data = DataSources({"val": dataloaders}, datamodule)
        return self._evaluate("validate", task, data, ckpt_path, verbose)

    def test(
        self,
        task: Task | None = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
    ) -> EvaluationValues:
        """Evaluate on the test data; return the logged values, exact over all samples,
        on all ranks. See `validate`.
        """
        data = DataSources({"test": dataloaders}, datamodule)
        return self._evaluate("test", task, data, ckpt_path, verbose)

    def _evaluate(
        self,
        kind: Literal["validate", "test"],
        task: Task | None,
        data: DataSources,
        ckpt_path: Any,
        verbose: bool,
    ) -> EvaluationValues:
        task, ckpt_path = self._model(task, ckpt_path)
        check_overrides(task, ("validation_step",) if kind == "validate" else ())
        with self._open(kind, task, data) as stage:
            if not stage.engine.ranks.takes_part:
                return EvaluationValues()
            evaluator, feeds = build_evaluator(stage, ckpt_path)
            name: Literal["test", "validation"] = "test" if kind == "test" else "validation"
            values = EvaluationValues(evaluator.evaluate(name, feeds))
            if values and verbose and stage.engine.ranks.is_main:
                source = stage.checkpoints.resumed_from
                values.show(f"{name}, {short(source) if source else 'the weights of the task'}")
            return values

    def predict(
        self,
        task: Task | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool = True,
        ckpt_path: str | None = None,
        write_to: str | Path | bool = False,
        table: TableFormat = "csv",
    ) -> list[Any] | None:
        """Return the results of `predict_step` for the batches of all ranks, on the CPU, in the
        data's order, on all ranks.

        Args:
            task: the model. Default: as in `validate`.
            dataloaders: as in `fit`; one.
            datamodule: provides it, in place of `dataloaders`.
            return_predictions: false returns None and holds nothing in memory.
            ckpt_path: the weights to load.
            write_to: a folder for the batches, each written once it is computed; true:
                `predictions` in the run's folder. `trainkit.read_predictions` reads them. A table
                of all samples is beside them.
            table: its format; "parquet" needs pyarrow.
        """
        task, ckpt_path = self._model(task, ckpt_path)
        check_overrides(task, ())
        data = DataSources({"predict": dataloaders}, datamodule)
        with self._open("predict", task, data) as stage:
            if not stage.engine.ranks.takes_part:
                return None
            if write_to is True:
                write_to = stage.run.run_dir / "predictions"
            evaluator, feeds = build_evaluator(stage, ckpt_path)
            folder = Path(write_to) if write_to else None
            return evaluator.predict(feeds, folder, return_predictions, table)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint folder (or fsspec URL), and wait for it. Call it on all ranks, during
        or after `fit`.

        Raises:
            ConfigError: no fit has run yet.
        """
        if self.engine.ranks.takes_part:
            if self._fitted is None:
                raise ConfigError(
                    "No fit has run yet, so there are no trained weights: call fit first."
                )
            self._fitted.save_checkpoint(filepath, weights_only)


report_uncaught_once()  # of a script; when it is imported, for the constructor's own refusals too
