"""Checkpoints at URLs: s3://, gs:// and what else fsspec knows (docs/checkpoints.md).

store.py   the store: a reader sees all of a checkpoint or none of it
lease.py   one run at a time writes at a URL, by a file beside the checkpoints (small_files.py)
"""

from trainkit.extension import Extension

EXTENSION = Extension(
    name="object_store",
    summary="checkpoints at URLs (callbacks.checkpoint.dirpath=s3://bucket/run), one run at a time",
    proven="each commit, in memory; on an S3 server in the full test run",
    url_store="trainkit.extensions.object_store.store.RemoteStore",
)
