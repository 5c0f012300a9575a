"""engine=deepspeed: optimizer state, gradients and weights split over the ranks by DeepSpeed (docs/deepspeed.md)."""

from trainkit.extension import Command, EngineEntry, Extension

_BUCKETS = "DeepSpeed sums gradients its own way; engine.config sets its buckets and what travels"

EXTENSION = Extension(
    name="deepspeed",
    summary="engine=deepspeed: ZeRO's stages 1 to 3, with offloading to the host's memory or disk",
    proven="in the full test run, stages 1 to 3 on ranks of the CPU; not on a GPU yet",
    commands={
        "deepspeed": Command("check DeepSpeed: what of it runs here, and build what it needs", "trainkit.cli.deepspeed.main")
    },
    engines={
        "deepspeed": EngineEntry(
            target="trainkit.engine.deepspeed.engine.DeepSpeedEngine",
            package="deepspeed",
            title="DeepSpeed",
            install="Install it: DS_BUILD_OPS=0 pip install deepspeed (or 'trainkit[deepspeed]').",
            options=("stage", "offload_optimizer", "offload_param", "nvme_path", "config"),
            lacking={
                **dict.fromkeys(
                    (
                        "compression",
                        "op",
                        "gradient_predivide_factor",
                        "num_groups",
                        "groups",
                        "sparse_as_dense",
                        "fusion_threshold_mb",
                        "cycle_time_ms",
                        "cache_capacity",
                        "autotune",
                        "autotune_log_file",
                        "bucket_cap_mb",
                    ),
                    _BUCKETS,
                ),
                "process_set": "DeepSpeed splits the state over all ranks",
                **dict.fromkeys(
                    ("shard", "replicas", "tensor", "tensor_plan", "reshard_after_forward", "cpu_offload", "param_dtype"),
                    "it is an option of engine=fsdp",
                ),
            },
        )
    },
)
