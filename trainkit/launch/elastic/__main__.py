"""`python -m trainkit.launch.elastic`, with horovodrun's options:
for tests, and for a horovodrun without trainkit's edits.
"""

from __future__ import annotations

import sys

from horovod.runner.launch import parse_args

from trainkit.launch.elastic.driver import run_elastic

if __name__ == "__main__":
    sys.exit(run_elastic(parse_args()))
