"""trainer.activation_checkpointing: blocks compute their activations again in backward.

feature.py   how a block is wrapped, with batch norm's statistics of the first forward alone
"""

from trainkit.extension import Extension

EXTENSION = Extension(
    name="recompute",
    summary="trainer.activation_checkpointing: activations are computed again in backward",
    proven="each commit",
    features=("trainkit.extensions.recompute.feature.of_stage",),
)
