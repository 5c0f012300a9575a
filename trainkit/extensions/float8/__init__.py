"""trainer.precision=fp8-mixed: large linear layers multiply in float8, by torchao
(docs/gpus.md).

precision.py  which layers, by which scales, on which devices
"""

from trainkit.extension import Extension

EXTENSION = Extension(
    name="float8",
    summary="trainer.precision=fp8-mixed: large linear layers multiply in float8 (torchao)",
    proven="each commit with float8 imitated on the CPU; on a GPU not yet",
    precisions={"fp8-mixed": "trainkit.extensions.float8.precision.Float8Precision"},
)
