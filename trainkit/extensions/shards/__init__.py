"""data pack and data=webdataset: samples in tar files, read from a folder or an object store (docs/data_at_scale.md)."""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="shards",
    summary="data pack and data=webdataset: samples in tar files, in a folder or on an object store",
    proven="each commit, on folders and on an S3 server",
    commands={
        "data pack": Command(
            summary="write a folder of images as tar files",
            main="trainkit.cli.data_pack.main",
            usage="trainkit.extensions.shards.usage.USAGE",
        )
    },
)
