"""A real S3 server on this machine (moto's),
for tests of what is read from and written to an object store.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import fsspec
import pytest

BUCKET = "images"


@dataclass(frozen=True)
class ObjectStore:
    """A server with an empty bucket.

    Attributes:
        url: of the bucket.
        environment: the variables that lead to the server.
    """

    url: str
    environment: dict[str, str]


@contextlib.contextmanager
def serve() -> Iterator[ObjectStore]:
    """Start a server; it ends with the context."""
    boto3 = pytest.importorskip("boto3", reason="trainkit[shards,test] is not installed")
    pytest.importorskip("moto.server")
    line = [sys.executable, "-c", "from moto.server import main; main()", "-p", "0"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            match = next(
                match
                for text in server.stderr
                if (match := re.search(r"Running on (http://[\d.:]+)", text))
            )
            keys = {
                "AWS_ACCESS_KEY_ID": "me",
                "AWS_SECRET_ACCESS_KEY": "mine",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            environment = {"AWS_ENDPOINT_URL": match[1], **keys}
            client = boto3.client(
                "s3",
                "us-east-1",
                endpoint_url=match[1],
                aws_access_key_id="me",
                aws_secret_access_key="mine",
            )
            client.create_bucket(Bucket=BUCKET)
            client.close()
            server.stderr.close()
            yield ObjectStore(f"s3://{BUCKET}", environment)
        finally:
            server.kill()


@contextlib.contextmanager
def within(environment: dict[str, str]) -> Iterator[None]:
    """Let this process find the server: fsspec keeps file systems of earlier variables."""
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield
