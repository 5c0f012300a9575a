"""trainer.sync_batchnorm: batch norm takes its statistics over the batch of all ranks.

layer.py     the layer, and the conversion in place
feature.py   what it refuses, and when layers are converted
"""

from trainkit.extension import Extension

EXTENSION = Extension(
    name="sync_batchnorm",
    summary="trainer.sync_batchnorm: batch norm's statistics over all ranks",
    proven="each commit",
    features=("trainkit.extensions.sync_batchnorm.feature.of_stage",),
)
