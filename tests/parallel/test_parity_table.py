"""The table of engines in docs/large_models.md: one problem, the same weights."""

from __future__ import annotations

import pytest

from tests.helpers.launching import Command
from tests.parallel.starts import ROOT

pytestmark = pytest.mark.parallel


def test_engines_end_with_the_same_weights(command: Command) -> None:
    """The gpt recipe under plain SGD, by Horovod, ddp and fsdp: within 1e-6 of one process."""
    names = ["horovod, 2 ranks", "ddp, 3 ranks", "fsdp, 2 ranks"]
    only = " ".join(f"'{name}'" for name in names)
    done = command(
        f"python -m benchmarks.parity --steps 6 --only {only}", timeout_s=400, PYTHONPATH=str(ROOT)
    )
    assert done.code == 0, done.text
    rows = {line[:32].strip(): float(line[32:]) for line in done.out.splitlines()}
    assert rows.keys() == {"single", *names} and max(rows.values()) <= 1e-6
