"""data: the command of several parts, each of an extension: data check, data tokens, data pack.

web_dataset.py   a WebDataset's shards, split over ranks and workers
lit_data.py      refuses LitData that would read another rank's part
"""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="data",
    summary="data: looks at data, or writes it in another form, by the parts of other extensions",
    proven="each commit",
    data_sets={
        "webdataset": "trainkit.extensions.data.web_dataset.read",
        "litdata": "trainkit.extensions.data.lit_data.read",
    },
    commands={
        "data": Command(
            summary="list samples that cannot be loaded (data check conf=NAME); write texts or images"
            " (data tokens, data pack)",
            main="trainkit.extensions.data.command.main",
            usage="trainkit.extensions.data.usage.USAGE",
        )
    },
)
