"""trainer.halve_batch_on_oom: a microbatch that exceeds the memory is split on all ranks, and the
step retried (docs/gpus.md).

oom.py    steps as transactions
"""

from trainkit.extension import Extension

EXTENSION = Extension(
    name="halving",
    summary="trainer.halve_batch_on_oom: microbatches that exceed the memory are split",
    proven="each commit",
    features=("trainkit.extensions.halving.oom.of_stage",),
)
