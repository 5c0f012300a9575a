"""Settings found by measuring the job itself:
each finder trains copies, and leaves no trace (docs/optimizers.md).
"""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="find",
    summary=(
        "find: the learning rate, the microbatch, the loader's workers and how gradients travel, by"
        " measuring the job"
    ),
    proven="each commit; the largest microbatch not on a GPU yet",
    commands={
        "find": Command(
            summary=(
                "find a setting by measuring the job: rate, microbatch, loader workers, the wire"
                " (find lr conf=NAME)"
            ),
            main="trainkit.extensions.find.command.main",
            usage="trainkit.extensions.find.usage.USAGE",
        )
    },
)
