"""What `data pack` takes."""

from trainkit.extension import Usage

USAGE = Usage(
    "IMAGES output=FOLDER|URL [key=value ...]",
    "Write a folder of images as tar files for data=webdataset, in a folder or on an object store;"
    " an interrupted packing continues.",
    (
        (
            "output",
            "FOLDER | URL",
            "",
            "the folder or URL to write, as s3://bucket/imagenet; it does not exist yet",
        ),
        ("shard_mb", "float", "256", "the size of a tar, about"),
        ("seed", "int", "0", "of the order of the images"),
        ("workers", "int", "4", "tars that are written at the same time"),
    ),
    ("/data/imagenet output=s3://bucket/imagenet",),
)
