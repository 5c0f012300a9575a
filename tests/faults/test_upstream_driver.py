"""Scripts with Horovod's own elastic API under trainkit's horovodrun:
Horovod's own driver runs them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.jobs import ROOT, WORKERS
from tests.helpers.launching import Done, run_command

pytestmark = pytest.mark.parallel

HANDED_OVER = "Horovod's own elastic driver takes the job"


def run(
    tmp_path: Path,
    options: str = "-np 2 --min-np 1",
    script: str = "hvd_elastic.py",
    **environment: str,
) -> Done:
    """Run a script under horovodrun to its end."""
    line = f"horovodrun --gloo {options} python {WORKERS / script} {tmp_path}"
    return run_command(
        line, tmp_path, 100, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **environment
    )


def test_a_script_with_horovods_elastic_api_survives_a_lost_rank(tmp_path: Path) -> None:
    """Recognised without any setting; its survivor trains to the end.
    On two hosts: Horovod's driver avoids a failed one.
    """
    done = run(tmp_path, "-np 2 --min-np 1 -H localhost:1,127.0.0.1:1")
    assert done.code == 0, done.text
    assert (tmp_path / "killed").exists() and done.out.count("ranks 1, steps 20, equal True") == 1
    assert done.err.count(HANDED_OVER) == 1 and "TRAINKIT_ELASTIC_DRIVER=trainkit" in done.err


def test_one_host_is_enough_while_no_rank_is_lost(tmp_path: Path) -> None:
    """Horovod's horovodrun refuses a single host;
    here the script runs, and the user reads what a lost worker means.
    """
    (tmp_path / "killed").touch()
    done = run(tmp_path)
    assert done.code == 0, done.text
    assert (
        done.out.count("ranks 2, steps 20, equal True") == 2
        and "a lost worker ends the job" in done.err
    )


def test_a_lost_rank_on_the_only_host_ends_the_job_at_once(tmp_path: Path) -> None:
    """Horovod's driver used to hang here:
    its server waited for a worker that waited for the server.
    """
    done = run(tmp_path)
    assert done.code == 1 and "one or more processes exited with non-zero status" in done.err, (
        done.text
    )


def test_the_variable_skips_the_first_start(tmp_path: Path) -> None:
    """With TRAINKIT_ELASTIC_DRIVER=horovod no worker is started by trainkit's driver."""
    (tmp_path / "killed").touch()
    done = run(
        tmp_path, "-np 2 --min-np 1 -H localhost:1,127.0.0.1:1", TRAINKIT_ELASTIC_DRIVER="horovod"
    )
    assert done.code == 0 and "[elastic]" not in done.text, done.text


def test_a_bad_value_of_the_variable_is_refused(tmp_path: Path) -> None:
    """Before any worker starts, with exit code 2 and the legal values."""
    done = run(tmp_path, TRAINKIT_ELASTIC_DRIVER="stock")
    assert done.code == 2
    assert "TRAINKIT_ELASTIC_DRIVER is 'stock'; it must be 'trainkit', 'horovod'" in done.err
    assert os.listdir(tmp_path) == []
