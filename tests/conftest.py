"""What all tests share: one thread, no launcher around them,
and the random state left as it was found.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.utils.data._utils as data_workers
from hypothesis import settings

from trainkit.checkpoint.stateful import random_state, set_random_state

pytest_plugins = ("tests.groups.plugin",)  # --group, durations

# A launcher's variables would turn every engine=auto of a unit test into a rank of another job.
_LAUNCHERS = (
    "HOROVOD_",
    "OMPI_",
    "PMI_",
    "MPI_LOCAL",
    "SLURM_",
    "TORCHELASTIC_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
)
for _name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
    del os.environ[_name]

# A claim for all inputs draws the same ones each time. `make test-all` draws new ones, and prints
# what fails as a line to keep.
settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.register_profile("search", print_blob=True, deadline=None)
settings.load_profile("search" if os.environ.get("TRAINKIT_TEST_SEARCH") else "same")

# The tasks are tiny, and tests run beside each other: threads wait for each other in loops, which cost
# a program ten times its own work. So for all that tests start, unless the environment says otherwise.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# so long the garbage collector waits for a worker: 5 s otherwise
data_workers.MP_STATUS_CHECK_INTERVAL = 0.2


# Half a million objects are imported, of which none is garbage: the collector looks at them no more.
gc.set_threshold(100_000, *gc.get_threshold()[1:])


def pytest_collection_finish() -> None:
    """Leave out of Python's collections what is imported by now."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_random_state() -> Iterator[None]:
    """Begin each test with the same random numbers, so that no test depends on another's draws."""
    before = random_state()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    yield
    set_random_state(before)
