"""`python -m trainkit.launch.elastic`, with horovodrun's options: for tests, and where horovodrun does not hand over."""

from __future__ import annotations

import sys

from horovod.runner.launch import parse_args

from trainkit.launch.elastic.driver import run_elastic

if __name__ == "__main__":
    sys.exit(run_elastic(parse_args()))
