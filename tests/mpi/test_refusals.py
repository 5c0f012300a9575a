"""What cannot work under mpirun is refused in words, before a file is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import BIN
from tests.mpi.jobs import FIT, ROOT, run

CURE = "`python -m trainkit horovod install --mpi`"


def test_a_horovod_without_mpi_is_refused(tmp_path: Path) -> None:
    """Each process would train alone and write the same files: rank 0 says what to do, once."""
    own = {"PYTHONPATH": str(ROOT), "PATH": f"{BIN}:/usr/bin:/bin"}
    done = run(f"mpirun -np 2 {FIT} conf=mlp", tmp_path, **own)
    assert done.code != 0 and not (tmp_path / "runs").exists()
    assert (
        done.text.count(
            "mpirun started 2 processes, but Horovod sees a world of 1: each would train alone."
        )
        == 1
    ), done.text
    assert (
        f"This Horovod was built without MPI: use horovodrun, or build it with {CURE}" in done.text
    )


HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
ON_GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            HYDRA,
            (
                "This Horovod was built with another MPI than this mpirun's: put the mpirun that it"
                " was built with first"
            ),
        ),
        (HYDRA | ON_GLOO, "has Horovod run on Gloo, which mpirun does not start: unset them."),
    ],
    ids=["another MPI", "Gloo"],
)
def test_ranks_that_do_not_meet_are_refused(
    variables: dict[str, str], words: str, tmp_path: Path
) -> None:
    """A rank of MPICH with a Horovod that was built with Open MPI,
    or one that is to run on Gloo.
    """
    done = run(f"{FIT} conf=mlp", tmp_path, **variables)
    assert done.code == 1 and not (tmp_path / "runs").exists()
    assert (
        "mpirun started 2 processes, but Horovod sees a world of 1" in done.text
        and words in done.text
    )


def test_an_elastic_job_is_refused(tmp_path: Path) -> None:
    """horovodrun says it before a rank starts."""
    done = run(f"horovodrun --mpi -np 2 --min-np 1 -H localhost:2 {FIT} conf=mlp", tmp_path)
    assert done.code == 2 and not (tmp_path / "runs").exists()
    assert "--mpi is given, and --min-np" in done.text and "Traceback" not in done.text, done.text


def test_a_second_start_is_refused(tmp_path: Path) -> None:
    """`find settings` starts Horovod again for each setting,
    which would end the process under MPI.
    """
    done = run("mpirun -np 2 python -m trainkit find settings conf=mlp steps=2", tmp_path)
    assert done.code != 0
    assert "a process can start MPI only once" in done.text and "horovodrun --gloo" in done.text, (
        done.text
    )
