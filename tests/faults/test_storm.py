"""A short storm (tests/faults/storm):
random faults over an elastic job on simulated hosts, and what must hold after them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.faults.jobs import ROOT
from tests.faults.storm.hosts import unavailable
from tests.helpers.launching import run_command

pytestmark = pytest.mark.parallel

SEED = 7
FAULTS = 4  # by number, not by time: on a busy machine a job's start alone takes minutes


@pytest.mark.parametrize("engine", ["horovod", "ddp"])
def test_a_job_survives_a_short_storm(tmp_path: Path, engine: str) -> None:
    """Each sample of each epoch counts once, the weights are the undisturbed run's,
    and nothing is left behind.
    """
    if why := unavailable():
        pytest.skip(f"no storm: {why}")
    line = (
        f"{sys.executable} -m tests.faults.storm --seed {SEED} --faults {FAULTS} --engine {engine}"
    )
    done = run_command(line, tmp_path, 400, PYTHONPATH=str(ROOT))
    assert done.code == 0, done.text
    _, _, summary = done.out.partition("\n{")
    seen = json.loads("{" + summary)
    assert sum(seen["survived"].values()) == FAULTS, done.text
