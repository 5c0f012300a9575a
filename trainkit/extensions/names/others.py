"""What to use here for names of transformers' Trainer, Keras, Horovod, Accelerate and Ray in Python code
(docs/migrate.md): where they would be imported, called or passed.
"""

from __future__ import annotations

from trainkit.extensions.names import lightning
from trainkit.extensions.names.lightning import each
from trainkit.extensions.names.transformers import TRAINING_ARGUMENTS

_SUMS = "Return the plain optimizer; gradients are summed over ranks."
_RUNS = "The engine starts and ends Horovod; call neither."
_WHOLE = "Rank 0's weights and state of the optimizer reach all ranks."
_LOGGED = "A logged value is the exact mean over all samples of all ranks."
_OWN_LOOP = "Your loop, with trainkit's engine, data and checkpoints."
_SCHEDULE = "Return it beside the optimizer, as torch's scheduler; docs/lightning.md."

PACKAGE = lightning.PACKAGE | each(
    {
        "init shutdown": f"In its place: Trainer.fit. {_RUNS}",
        "size local_size": "In its place: world_size(). In a Task: self.trainer.world_size.",
        "local_rank": "In its place: Task.local_rank. Each rank's GPU is chosen already.",
        "DistributedOptimizer": f"In its place: Task.configure_optimizers. {_SUMS}",
        "broadcast_parameters broadcast_optimizer_state broadcast_object": (
            f"In its place: Trainer.fit. {_WHOLE}"
        ),
        "allreduce allgather": f"In its place: Task.log or Task.all_gather. {_LOGGED}",
        "Adasum Average Sum": "In its place: engine.op. average, sum or adasum.",
        "Compression": "In its place: engine.compression. fp16 or none.",
        "ElasticSampler TorchState": (
            "In its place: Elastic. callbacks=elastic; samples of the epoch are shared out again."
        ),
        "SyncBatchNorm": "In its place: Trainer(sync_batchnorm=...). Of the plain batch norms.",
        "alltoall reducescatter": (
            "In its place: Task.all_gather. For others call Horovod itself, beside trainkit."
        ),
        "join": "In its place: Trainer.fit. A rank without samples takes part with none.",
        "DistributedDataParallel": "In its place: Trainer.fit. It takes the plain model.",
        "DistributedSampler": (
            "In its place: DataModule. shuffle=True in its loader is all: samples are split over"
            " ranks."
        ),
        "Accelerator": f"In its place: Loop. {_OWN_LOOP}",
        "TrainingArguments": (
            "In its place: Trainer(...). docs/migrate.md has a table of its settings."
        ),
        "TrainerCallback": "In its place: Callback. Override its hooks.",
        "RayDDPStrategy RayFSDPStrategy RayDeepSpeedStrategy RayLightningEnvironment": (
            "In its place: Trainer(engine=...). auto takes the workers that Ray Train started."
        ),
        "prepare_trainer prepare_model prepare_data_loader": (
            "In its place: Trainer.fit. It takes the plain model and DataLoader."
        ),
        "Model Sequential": (
            "In its place: Task. A torch module with training_step and configure_optimizers."
        ),
    }
)

CALLBACKS = lightning.CALLBACKS | each(
    {
        "BroadcastGlobalVariablesCallback BroadcastGlobalVariables": (
            f"In its place: Trainer.fit. {_WHOLE}"
        ),
        "CommitStateCallback": "In its place: Elastic. commit_every_n_steps.",
        "LearningRateScheduleCallback": f"In its place: Task.configure_optimizers. {_SCHEDULE}",
        "LearningRateWarmupCallback": "In its place: Trainer(lr_warmup_epochs=...). By steps.",
        "MetricAverageCallback": f"In its place: Task.log. {_LOGGED}",
        "BackupAndRestore": 'In its place: Trainer.fit(ckpt_path="auto"). Exact, also mid-epoch.',
        "EarlyStoppingCallback": "In its place: EarlyStopping. `patience` is the number to wait.",
        "LearningRateScheduler ReduceLROnPlateau": (
            f"In its place: Task.configure_optimizers. {_SCHEDULE}"
        ),
        "CSVLogger TensorBoard TensorBoardCallback WandbCallback": (
            "In its place: Trainer(logger=...). trainkit.loggers has CSVLogger, TensorBoardLogger,"
            " WandbLogger and more."
        ),
        "PrinterCallback ProgbarLogger ProgressCallback": "In its place: ProgressBar. One bar.",
        "TerminateOnNaN": "In its place: Trainer(stop_on_nonfinite=True). Without it one line says so.",
        "TrainerCallback": "In its place: Callback. Override its hooks.",
        "RayTrainReportCallback": "In its place: RayReport. Values and a checkpoint, by all ranks.",
        "TuneReportCallback TuneReportCheckpointCallback": (
            "In its place: TuneReport. All logged values, epoch, step, and a checkpoint."
        ),
    }
)

TRAINER = lightning.TRAINER | each(
    {
        "compile": (
            "In its place: Task.configure_optimizers and Task.training_step. Or, for torch.compile:"
            " Trainer(compile=...)."
        ),
        "evaluate": "In its place: Trainer.validate or Trainer.test.",
        "fit_loop predict_loop test_loop validate_loop": (
            "In its place: Trainer(max_epochs=...). Each phase has a Trainer of its own; the Task"
            " keeps its weights. Whether a fit validates: trainer.evaluator.has_data; its batches:"
            " trainer.num_training_batches."
        ),
        "profiler": "In its place: trainer.callbacks. A profiler is one of them.",
        "push_to_hub save_model": (
            "In its place: export. `python -m trainkit export run_dir=... format=huggingface`"
            " writes a folder that `hf upload` takes."
        ),
        "train": "In its place: Trainer.fit. It takes the Task and its data.",
    }
)

_OF_TASK = "Trainer.fit takes the Task, which has the model."

SETTINGS = TRAINING_ARGUMENTS | each(
    {
        "args": "In its place: Trainer(max_epochs=...). docs/migrate.md has a table of settings.",
        "compute_metrics": f"In its place: Task.validation_step. self.log(name, value). {_LOGGED}",
        "data_collator": "In its place: DataLoader(collate_fn=...). Your data's loader has it.",
        "eval_dataset train_dataset": (
            "In its place: Trainer.fit(task, train_dataloaders, val_dataloaders)."
        ),
        "loss metrics": "In its place: Task.training_step. It returns the loss, and logs values.",
        # of TrainingArguments before transformers 5
        "warmup_ratio": (
            "In its place: trainer.lr_warmup_steps. A number of steps, or lr_warmup_epochs."
        ),
        "group_by_length": "In its place: DataLoader(batch_sampler=...). Your data's loader has it.",
        "evaluation_strategy": (
            "In its place: trainer.val_check_interval, trainer.check_val_every_n_epoch."
        ),
        "no_cuda": "In its place: engine.device. `engine.device=cpu`.",
        "model": f"In its place: Task. {_OF_TASK}",
        "optimizer optimizers": f"In its place: Task.configure_optimizers. {_OF_TASK}",
        "processing_class tokenizer": "It belongs to your data, as a DataModule's tokenizer.",
    }
)

FIT = each(
    {
        "batch_size": "In its place: DataLoader(batch_size=...). A microbatch of one rank.",
        "callbacks": "In its place: Trainer(callbacks=...). They are of the Trainer.",
        "epochs": "In its place: Trainer(max_epochs=...).",
        "resume_from_checkpoint": 'In its place: ckpt_path. "last", a folder, or "auto".',
        "train_dataset x": "In its place: train_dataloaders. A DataLoader, or a data set.",
        "eval_dataset validation_data": "In its place: val_dataloaders. A DataLoader.",
    }
)

# By package: "The optimizer is ...".
OPTIMIZERS = {
    "horovod": (
        "Horovod's DistributedOptimizer, and gradients are summed over ranks without it. Give the"
        " optimizer that it wraps; its backward_passes_per_step is"
        " trainer.accumulate_grad_batches."
    ),
    "accelerate": (
        "accelerate's AcceleratedOptimizer, and gradients are summed, accumulated and unscaled"
        " without it. Give the optimizer that accelerator.prepare was given; its"
        " gradient_accumulation_steps is trainer.accumulate_grad_batches."
    ),
}

_PARTS = "which has each rank's own part, and trainkit splits data over ranks itself. Give"
_WHOLE_DATASET = "trainkit.data.RayData(dataset, batch_size=...), with the whole Dataset."

_PREPARED = f"accelerate's, {_PARTS} the DataLoader that accelerator.prepare was given."

# By package and class, or one that it derives from: "... is ...".
DATA = {
    "accelerate DataLoader": _PREPARED,
    "accelerate DataLoaderAdapter": _PREPARED,  # it passes for a DataLoader by its __class__
    "ray DataLoader": f"Ray's, {_PARTS} the DataLoader that prepare_data_loader was given.",
    "ray Dataset": f"Ray's, which yields no batches. Give {_WHOLE_DATASET}",
    "ray DataIterator": (
        f"Ray's, {_PARTS} {_WHOLE_DATASET} Or say that each rank reads its own:"
        " trainkit.sharded(shard.iter_torch_batches(batch_size=...))."
    ),
}

RAY_DATA = each(
    {
        "local_shuffle_buffer_size local_shuffle_seed": (
            "In its place: RayData.shuffle=true. All samples at each epoch, by the run's seed."
        ),
        "collate_fn dtypes batch_format": (
            "In its place: RayData.transform. On numpy arrays by column, in Ray's workers."
        ),
        "device pin_memory prefetch_batches": (
            "Leave it out: batches are read ahead, and moved to each rank's device."
        ),
        "drop_last": "Leave it out: a short last step is weighted; trainer.pad_last_step fills it.",
    }
)

REPORT = each(
    {
        "metrics": "Leave it out: all logged values are reported, by their own names.",
        "on": "Leave it out: after each validation, or each epoch of a run without one.",
        "filename save_checkpoints": "In its place: checkpoints. A folder of trainkit's format.",
    }
)

EARLY_STOPPING = each(
    {
        "early_stopping_patience": "In its place: patience.",
        "early_stopping_threshold": "In its place: min_delta.",
        "restore_best_weights": (
            'In its place: Trainer.test(ckpt_path="best"). Weights stay those of the last step;'
            " ModelCheckpoint saves the best."
        ),
    }
)

MODEL_CHECKPOINT = each(
    {
        "save_best_only": (
            "In its place: monitor and save_last=False. By default the newest is saved too."
        ),
        "save_freq": "In its place: every_n_epochs, or every_n_train_steps.",
        "save_steps": "In its place: every_n_train_steps.",
        "save_total_limit": "In its place: save_top_k.",
    }
)

# Of callbacks of transformers and Keras, and of Lightning before 2.0.
HOOKS = each(
    {
        "on_batch_begin on_batch_start on_train_batch_begin": "In its place: on_train_batch_start.",
        "on_batch_end on_substep_end": "In its place: on_train_batch_end.",
        "on_epoch_begin on_epoch_start": "In its place: on_train_epoch_start.",
        "on_epoch_end": "In its place: on_train_epoch_end.",
        "on_evaluate": "In its place: on_validation_end.",
        "on_init_end on_pretrain_routine_start on_pretrain_routine_end": (
            "In its place: on_fit_start."
        ),
        "on_keyboard_interrupt": "In its place: on_exception.",
        "on_log": "In its place: on_metrics. It gets the values that loggers get, and the step.",
        "on_optimizer_step": "In its place: on_after_optimizer_step.",
        "on_pre_optimizer_step": "In its place: on_before_optimizer_step.",
        "on_predict_begin": "In its place: on_predict_start.",
        "on_predict_batch_begin": "In its place: on_predict_batch_start.",
        "on_prediction_step": "In its place: on_validation_batch_end.",
        "on_save": "In its place: on_save_checkpoint.",
        "on_step_begin": "In its place: on_train_step_start.",
        "on_step_end": "In its place: on_train_step_end.",
        "on_test_batch_begin": "In its place: on_test_batch_start. Or on_validation_batch_start.",
        "on_test_begin": "In its place: on_test_start. Or on_validation_start.",
        "on_train_begin": "In its place: on_train_start.",
    }
)
