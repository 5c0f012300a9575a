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
