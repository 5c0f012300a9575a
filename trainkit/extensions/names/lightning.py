"""What to use here for a name of Lightning's that trainkit lacks; docs/lightning.md has the same
table.
"""

from __future__ import annotations


def each(texts: dict[str, str]) -> dict[str, str]:
    """Return the text of each name, of several names in one key."""
    return {name: text for names, text in texts.items() for name in names.split()}


TRAINER = each(
    {
        "accelerator strategy precision_plugin": (
            "In its place: trainer.engine. The engine has the device, the collectives and the"
            " sums of gradients; `strategy.barrier()` is `engine.comm.barrier()`. `precision` is an"
            " object with autocast and the loss scale."
        ),
        "ckpt_path": (
            "In its place: Trainer.fit(ckpt_path=...). Pass it where training starts; the"
            " banner names the checkpoint."
        ),
        "default_root_dir": "In its place: trainer.run_dir. The folder of one run.",
        "device_ids node_rank": "A rank sees one device, and hosts have no order.",
        "distributed_sampler_kwargs": "Data are split over ranks without a sampler of yours.",
        "enable_validation": (
            "Validation runs if there are data for it and limit_val_batches is not 0."
        ),
        "evaluating": "In its place: trainer.validating. Or `trainer.testing`.",
        "init_module": "A Task is built as any module; its weights are moved before training.",
        "interrupted received_sigterm": (
            "A signal ends all ranks at one step with a checkpoint, and fit raises Preempted."
        ),
        "lr_scheduler_configs": (
            "In its place: trainer.rates. The schedules and the contract of batch and rate."
        ),
        "num_predict_batches num_sanity_val_batches num_test_batches num_val_batches": (
            "In its place: trainer.evaluator. Its num_batches is that of the evaluation in"
            " progress."
        ),
        "predict_dataloaders test_dataloaders train_dataloader val_dataloaders": (
            "In its place: trainer.datamodule. Or the Task: what they return is not kept. Their"
            " length: num_training_batches, or estimated_stepping_batches for a schedule."
        ),
        "progress_bar_metrics": (
            "In its place: trainer.callback_metrics. The values that the bar shows are among them."
        ),
        "scaler": "In its place: trainer.precision. It has the loss scale.",
    }
)

CALLBACKS = each(
    {
        "BatchSizeFinder": (
            "In its place: Trainer(halve_batch_on_oom=...). A batch that does not fit is split,"
            " the step stays the same; `python -m trainkit find batch` finds the largest that"
            " fits."
        ),
        "Checkpoint": (
            "In its place: ModelCheckpoint. The base of others' checkpoint callbacks; write a"
            " Callback that calls save_checkpoint."
        ),
        "GradientAccumulationScheduler": (
            "In its place: Trainer(accumulate_grad_batches=...). {0: 4, 10: 1}: the rate follows."
        ),
        "LearningRateFinder": (
            "In its place: find_lr(...). `trainkit.find_lr(task, loader)` before the fit, over"
            " all ranks; also `python -m trainkit find lr conf=NAME`."
        ),
        "ModelPruning": "Call torch.nn.utils.prune in on_train_epoch_end.",
        "OnExceptionCheckpoint": (
            "In its place: ModelCheckpoint(save_on_exception=...). Of the step before the error."
        ),
        "RichModelSummary": "In its place: ModelSummary. The same table.",
        "RichProgressBar TQDMProgressBar": "In its place: ProgressBar. One bar, by rich.",
        "EMAWeightAveraging WeightAveraging": (
            "In its place: EMA. StochasticWeightAveraging has Lightning's name."
        ),
    }
)

LOGGERS = each(
    {
        "CometLogger LitLogger": "Write a Callback with on_metrics, which gets what loggers get.",
        "Logger": (
            "In its place: Callback.on_metrics. A logger is a callback; on_metrics gets the"
            " values and the step."
        ),
    }
)

_OTHERS = each(
    {
        "DDPStrategy DeepSpeedStrategy FSDPStrategy ModelParallelStrategy SingleDeviceStrategy": (
            "In its place: Trainer(engine=...). Its name, as ddp, fsdp or deepspeed, or"
            " trainkit.engine.select.make_engine(name, ...) with options."
        ),
        "Fabric": "In its place: Loop. Your loop, with trainkit's engine, data and checkpoints.",
        "grad_norm": "In its place: GradientMonitor. A callback; it logs the norm of each layer.",
        "rank_zero_info rank_zero_warn": (
            "In its place: rank_zero_only. It decorates a function of yours that prints or logs."
        ),
    }
)

PACKAGE = {
    "LightningModule": (
        "It is trainkit.Task: change the base class, the methods have the same names."
    ),
    "LightningDataModule": (
        "It is trainkit.DataModule: change the base class, the methods have the same names."
    ),
    "LightningCLI": (
        "It is the command `python -m trainkit fit conf=NAME`, configured by files in conf/."
    ),
    **CALLBACKS,
    **LOGGERS,
    **_OTHERS,
}

_MODES = (
    "Modes are set before an evaluation and restored after it; a part that you set to eval() stays"
    " so. Use on_validation_start and on_validation_end, or those of test and predict."
)

TASK_METHODS: dict[str, str] = {
    "on_validation_model_eval": _MODES,
    "on_validation_model_train": _MODES,
    "on_validation_model_zero_grad": "Gradients are set to None before each step.",
    "on_test_model_eval": _MODES,
    "on_test_model_train": _MODES,
    "on_predict_model_eval": _MODES,
    "training_epoch_end": "Use on_train_epoch_end.",
    "validation_epoch_end": (
        "Use on_validation_end, and log in validation_step: values are averaged over all samples."
    ),
    "test_epoch_end": (
        "Use on_test_end, and log in test_step: values are averaged over all samples."
    ),
    "training_step_end": "Do it in training_step: each rank is a process of its own.",
    "validation_step_end": "Do it in validation_step: each rank is a process of its own.",
    "backward": (
        "trainkit calls the loss's backward itself; on_before_backward and on_after_backward are"
        " around it."
    ),
    "configure_sharded_model": "Use configure_model.",
}

# Of LightningOptimizer, which self.optimizers() returns there.
OPTIMIZER = {
    "toggle_model": (
        "In its place: `with self.toggled_optimizer(optimizer):`, a method of the Task. Gradients are"
        " summed before each optimizer.step(), so sync_grad is not needed."
    ),
}

# Entries of the dict that hooks of a checkpoint receive.
CHECKPOINT = each(
    {
        "callbacks": "Each callback's state is its own: state_dict() and load_state_dict().",
        "hyper_parameters datamodule_hyper_parameters": (
            "In its place: self.hparams. What save_hyperparameters() has saved."
        ),
        "loops": "In its place: checkpoint['epoch']. And checkpoint['global_step'].",
        "lr_schedulers optimizer_states": (
            "Optimizers and schedules resume as they were saved. To begin with new ones:"
            " fit(task, init_weights=CHECKPOINT)."
        ),
        "state_dict": (
            "Weights are loaded before a callback's on_load_checkpoint. The Task's can change them."
        ),
    }
)

LOAD_FROM_CHECKPOINT = {
    "hparams_file": (
        "A checkpoint holds what save_hyperparameters saved. In its place give the arguments of"
        " __init__ by their names: load_from_checkpoint(path, **yaml.safe_load(open(FILE)))."
    ),
    "weights_only": "Leave it out: a checkpoint is always read without running code of it.",
}
