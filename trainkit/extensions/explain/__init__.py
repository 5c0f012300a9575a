"""explain: the command that prints what an error means, from the page of cli/explained."""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="explain",
    summary="explain: what an error means, with an example and what to do",
    proven="each commit",
    commands={
        "explain": Command(
            summary="explain an error that a message names, with an example and what to do"
            " (explain NAME)",
            main="trainkit.extensions.explain.command.main",
            usage="trainkit.extensions.explain.usage.USAGE",
        )
    },
)
