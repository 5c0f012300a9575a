"""What all tests share: one thread, no launcher around them,
and the random state left as it was found. The process that only distributes tests imports no torch.
"""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

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
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Half a million objects are imported, of which none is garbage: the collector looks at them no more.
gc.set_threshold(100_000, *gc.get_threshold()[1:])


def pytest_configure(config: pytest.Config) -> None:
    """Import torch where tests run, before any of them."""
    if not config.getoption("numprocesses", None):
        importlib.import_module("tests.helpers.torch_state")


def pytest_collection_finish() -> None:
    """Leave out of Python's collections what is imported by now."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_random_state() -> Iterator[None]:
    """Begin each test with the same random numbers, so that no test depends on another's draws."""
    with importlib.import_module("tests.helpers.torch_state").fixed_random_state():
        yield
