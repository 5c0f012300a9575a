"""Names that users bring from Lightning and that mean nothing here, each with what to do instead."""

from __future__ import annotations

_LAUNCHER_DECIDES = (
    "trainkit has no such setting: the launcher decides where a run runs. Start N processes with `horovodrun -np N ...` "
    "or `torchrun --nproc-per-node N ...`; choose the framework with engine=auto|single|horovod|ddp."
)

TRAINER_ARGUMENTS: dict[str, str] = {
    "accelerator": _LAUNCHER_DECIDES,
    "devices": _LAUNCHER_DECIDES,
    "num_nodes": _LAUNCHER_DECIDES,
    "strategy": _LAUNCHER_DECIDES,
    "default_root_dir": "trainkit calls it run_dir: the folder of one run.",
    "use_distributed_sampler": "data is always dealt to the ranks, each sample once; leave it out.",
}

LOG_ARGUMENTS: dict[str, str] = {
    "sync_dist": "leave it out: an epoch's value is always exact over the samples of all ranks.",
    "sync_dist_group": "leave it out: an epoch's value is always that of all ranks that train.",
    "rank_zero_only": "leave it out: all ranks' samples count, and rank 0 writes.",
    "logger": "leave it out: what is logged goes to each logger.",
    "add_dataloader_idx": "leave it out: values of several loaders are always told apart by their number.",
    "enable_graph": "leave it out: a logged value holds no graph.",
    "metric_attribute": "leave it out: a torchmetrics object is known by itself.",
}
