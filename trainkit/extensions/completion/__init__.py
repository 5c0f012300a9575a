"""completion: tab completion for bash."""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="completion",
    summary="completion: tab completion for bash, of commands, configs, settings and runs",
    proven="each commit",
    commands={
        "completion": Command(
            summary="print the tab completion for bash",
            main="trainkit.extensions.completion.command.main",
            usage="trainkit.extensions.completion.usage.USAGE",
        )
    },
)
