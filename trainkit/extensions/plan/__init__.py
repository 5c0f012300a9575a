"""plan: what a run would do at any number of ranks,
worked out before it starts (docs/optimizers.md).
"""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="plan",
    summary=(
        "plan: batches, steps, rates, traffic and memory of a fit at any number of ranks, without"
        " training"
    ),
    proven="each commit; memory of a GPU not yet",
    commands={
        "plan": Command(
            summary=(
                "describe what fit would do, at any number of ranks (ranks=64), without training"
            ),
            main="trainkit.extensions.plan.command.main",
            usage="trainkit.extensions.plan.usage.USAGE",
        )
    },
)
