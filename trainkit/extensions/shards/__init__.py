"""data pack and data=webdataset: samples in tar files, read from a folder or an object store
(docs/data.md).

store       files at a path or URL: read, fetched, written; errors in words
tar         which bytes of a tar are which file of which sample
index       the shards of a data set with their samples: index.json, read or made
cache       whole shards on this host's disk, up to a size, shared by its ranks and loader workers
dataset     a map-style Dataset over all of it, so that order, resume and `data check` are those of any other
order       a shuffle in two levels, kind to shards: an order of (seed, epoch), the same on any number of ranks
packer      an image folder to shards: `python -m trainkit data pack`
"""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="shards",
    summary=(
        "data pack and data=webdataset: samples in tar files, in a folder or on an object store"
    ),
    proven="each commit, on folders and on an S3 server",
    commands={
        "data pack": Command(
            summary="write a folder of images as tar files",
            main="trainkit.extensions.shards.command.main",
            usage="trainkit.extensions.shards.usage.USAGE",
        )
    },
)
