"""engine=fsdp: weights, gradients and optimizer state split over the ranks by torch's FSDP2
(docs/large_models.md).

engine.py            FSDPEngine: each rank holds a part of what one process holds
units.py             the modules whose weights are gathered one at a time, or a stage that has none
tensor.py            engine.tensor: layers split by width
widths.py            the same in one process, as `plan` measures it
layouts.py           options that other extensions bring
random_numbers.py    those of a step whose ranks read the same samples
replicas.py          engine.replicas under `trainkit launch`: a replica that loses a rank comes back as a whole
own_group.py         their groups of ranks, which torch.distributed does not know
"""

from trainkit.extension import EngineEntry, Extension

_TARGET = "trainkit.extensions.fsdp.engine.FSDPEngine"
_SCATTERED = "gradients are summed there unit by unit, each rank its part (engine.shard)"

EXTENSION = Extension(
    name="fsdp",
    summary="engine=fsdp: a part of the weights, gradients and optimizer state on each rank",
    proven="each commit, on ranks of the CPU; not on a GPU yet",
    names={
        "trainkit.engine.fsdp.engine.FSDPEngine": _TARGET,
        "trainkit.engine.fsdp.FSDPEngine": _TARGET,
    },
    engines={
        "fsdp": EngineEntry(
            target=_TARGET,
            options=(
                "shard",
                "replicas",
                "tensor",
                "tensor_plan",
                "pipeline",
                "pipeline_schedule",
                "pipeline_chunks",
                "context",
                "reshard_after_forward",
                "cpu_offload",
                "param_dtype",
            ),
            elsewhere=(
                "weights are whole there; engine=fsdp, started by torchrun, splits them over ranks"
            ),
            lacking={
                **dict.fromkeys(
                    (
                        "op",
                        "gradient_predivide_factor",
                        "num_groups",
                        "groups",
                        "fusion_threshold_mb",
                        "cycle_time_ms",
                        "cache_capacity",
                        "autotune",
                        "autotune_log_file",
                        "bucket_cap_mb",
                    ),
                    _SCATTERED,
                ),
                "compression": "engine.param_dtype sends weights in fewer bytes there",
                "sparse_as_dense": "embeddings have dense gradients there",
                "process_set": "all ranks hold a part of the weights",
            },
        )
    },
)
