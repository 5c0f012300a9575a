"""Elastic jobs: horovodrun's elastic mode asks for `run_elastic`,
and runs Horovod's own driver if that is None.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from trainkit.extensions.elastic import driver, upstream

run_elastic: Callable[[argparse.Namespace], int] | None  # see __getattr__


def __getattr__(name: str) -> Any:
    """Return trainkit's driver as `run_elastic`,
    or None if TRAINKIT_ELASTIC_DRIVER chooses Horovod's.
    """
    if name != "run_elastic":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    if os.environ.get(upstream.CHOICE) != upstream.HOROVOD:
        return driver.run_elastic
    upstream.prepare()
    return None


def main() -> int:
    """Run an elastic job with horovodrun's options; return the exit code."""
    from horovod.runner.launch import parse_args

    return driver.run_elastic(parse_args())
