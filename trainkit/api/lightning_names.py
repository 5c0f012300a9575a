"""Names of Lightning that trainkit does not have, each with its replacement."""

from __future__ import annotations

_LAUNCHER_DECIDES = (
    "trainkit has no such setting: the launcher decides where a run runs. Start N processes with"
    " `horovodrun -np N ...` or `torchrun --nproc-per-node N ...`; choose the framework with"
    " engine=auto|single|horovod|ddp. A notebook is one process, so it trains on one rank: for"
    " more, write the code to a file (%%writefile train.py) and start it from a cell (!horovodrun"
    " -np 2 python train.py)."
)

TRAINER_ARGUMENTS: dict[str, str] = {
    "devices": _LAUNCHER_DECIDES,
    "num_nodes": _LAUNCHER_DECIDES,
    "strategy": _LAUNCHER_DECIDES,
    "default_root_dir": "trainkit calls it run_dir: the folder of one run.",
    "gpus": _LAUNCHER_DECIDES,
    "resume_from_checkpoint": (
        "pass it where training starts: fit(task, ckpt_path=...); at the command line"
        " ckpt_path=last, ckpt_path=PATH or resume=auto."
    ),
    "checkpoint_callback": (
        "trainkit calls it enable_checkpointing: true or false; a ModelCheckpoint goes into"
        " callbacks."
    ),
    "use_distributed_sampler": (
        "data is always sharded over the ranks, each sample once; leave it out."
    ),
}

# Without effect here: nothing logged keeps its graph, and a metric object is found without its
# attribute's name.
LOG_IGNORES = ("enable_graph", "metric_attribute")

LOG_ARGUMENTS: dict[str, str] = {
    "sync_dist_group": "leave it out: an epoch's value is always that of all ranks that train.",
}

_OWN_UPDATE = (
    "trainkit steps each optimizer once a step. To see or change its gradients, divided:"
    " on_before_optimizer_step."
)

TASK_METHODS: dict[str, str] = {
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
    "optimizer_step": _OWN_UPDATE,
    "optimizer_zero_grad": (
        "Gradients are set to None before each step; on_before_zero_grad comes before it."
    ),
    "configure_gradient_clipping": f"Set trainer.gradient_clip_val. {_OWN_UPDATE}",
    "lr_scheduler_step": (
        'Return {"scheduler": ..., "interval": "step" | "epoch", "frequency": n} from'
        " configure_optimizers."
    ),
}
