"""Fits a line under torchrun; after all exit handlers, each rank prints which of Gloo's threads are
alive.

    torchrun --nproc-per-node 2 leaving.py FOLDER

A Gloo thread that lives while the interpreter ends may ask for Python's lock to let go of a tensor,
and then aborts the process.
"""

from __future__ import annotations

import atexit
import sys
from pathlib import Path

from tests.helpers.toy import Line, loader, quiet


def say_what_lives() -> None:
    """Print this process's threads with "gloo" in their names."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    print(f"left: {sorted(name for name in names if 'gloo' in name)}", flush=True)


atexit.register(say_what_lives)  # the first registered runs last
quiet(Path(sys.argv[1]), max_epochs=1).fit(Line(), loader(16), loader(4))
