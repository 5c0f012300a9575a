"""`trainkit serve` as a process, and requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def service(run_dir: Path, *words: str, cwd: Path | None = None) -> Iterator[str]:
    """Serve; yield the address.

    Args:
        cwd: the folder that paths of the run's config begin at; None: that around `run_dir`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = run_dir.parent / f"serve-{port}.txt"
    command = [sys.executable, "-m", "trainkit", "serve", str(run_dir), f"port={port}", *words]
    with path.open("w") as log:
        own = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=cwd or run_dir.parent, env=own
        )
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 120
        while ask(f"{address}/health")[0] != 200:
            assert process.poll() is None and time.monotonic() < end, path.read_text()
            time.sleep(0.3)
        yield address
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def ask(url: str, body: bytes | None = None, kind: str = "application/json") -> tuple[int, Any]:
    """Return status and JSON of an answer; 0 if nothing listens."""
    # a proxy without a route yet
    with contextlib.suppress(urllib.error.URLError, ConnectionError, json.JSONDecodeError):
        return _ask(url, body, kind)
    return 0, None


def _ask(url: str, body: bytes | None, kind: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, body, {"content-type": kind}), timeout=60
        ) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
