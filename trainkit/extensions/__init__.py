"""What a user asks for by name, beside the core: a folder for each, with all its parts, and its
value EXTENSION.

The core finds them through trainkit/extension.py and imports none. Without this folder it trains
all the same.
"""

# In the order of `python -m trainkit extensions`.
NAMES = (
    "data",
    "explain",
    "reports",
    "doctor",
    "by_hand",
    "programs",
    "script",
    "plan",
    "experiment",
    "timeline",
    "profilers",
    "find",
    "capsule",
    "check_resume",
    "check_engine",
    "exporting",
    "serving",
    "suites",
    "object_store",
    "shards",
    "language",
    "finetuning",
    "swa",
    "adapters",
    "float8",
    "optimizers",
    "trackers",
    "horovod_build",
    "fsdp",
    "pipeline",
    "context",
    "deepspeed",
    "elastic",
    "slurm",
    "kubernetes",
    "ray",
    "jobs",
    "completion",
    "insight",
    "balance",
    "communication",
    "faults",
    "audit",
    "names",
)
