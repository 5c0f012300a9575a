"""engine=deepspeed: optimizer state, gradients and weights split over the ranks by DeepSpeed's ZeRO
(docs/large_models.md).

engine.py      DeepSpeedEngine: DeepSpeed's engine owns backward, sums, clipping and update
refusals.py    what DeepSpeed cannot serve, and why
config.py      writes DeepSpeed's config from trainkit's settings, and checks the user's own against them
sections.py    the sections of the user's config that trainkit has a value for
split.py       weights and optimizer state: whole from the parts that ranks hold, and back
adapter.py     DeepSpeed itself: the only file that imports it
extensions.py  the compiled parts of DeepSpeed: where they are built, and which are there
    parts.py       a process that compiles one of them
    proof.py       a job of two ranks that tries each stage and offload
command.py     `deepspeed check`
"""

from trainkit.extension import Command, EngineEntry, Extension

_BUCKETS = "DeepSpeed sums gradients its own way; engine.config sets its buckets and what travels"

EXTENSION = Extension(
    name="deepspeed",
    summary="engine=deepspeed: ZeRO's stages 1 to 3, with offloading to the host's memory or disk",
    proven="in the full test run, stages 1 to 3 on ranks of the CPU; not on a GPU yet",
    commands={
        "deepspeed": Command(
            "check DeepSpeed: what of it runs here, and build what it needs",
            "trainkit.extensions.deepspeed.command.main",
        )
    },
    names={
        "trainkit.engine.deepspeed.engine.DeepSpeedEngine": (
            "trainkit.extensions.deepspeed.engine.DeepSpeedEngine"
        )
    },
    engines={
        "deepspeed": EngineEntry(
            target="trainkit.extensions.deepspeed.engine.DeepSpeedEngine",
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
            },
        )
    },
)
