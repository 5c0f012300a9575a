"""OpenMP's threads while they wait for each other, in the processes of a command.

torch's OpenMP on Linux lets a thread that waits spin 300,000 times, some milliseconds, before it
sleeps. If another process has the core of the thread that it waits for, it spins that long at each
operation of each layer: beside one busy process a fit on two cores takes 4 to 9 times as long.
Imports no torch, which reads the variable as it is imported.
"""

from __future__ import annotations

import os

# some 20 microseconds: longer than most waits between operations
_SPINS = "1000"


def wait_briefly() -> None:
    """Let waiting threads sleep soon, unless the environment says how they wait."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _SPINS
