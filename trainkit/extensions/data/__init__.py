"""data: the command of several parts, each of an extension: data check, data tokens, data pack."""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="data",
    summary="data: looks at data, or writes it in another form, by the parts of other extensions",
    proven="each commit",
    commands={
        "data": Command(
            summary="list samples that cannot be loaded (data check conf=NAME); write texts or images"
            " (data tokens, data pack)",
            main="trainkit.extensions.data.command.main",
            usage="trainkit.extensions.data.usage.USAGE",
        )
    },
)
