"""A fit under mpirun: its banner, its recording, a process set, an error of one rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.journals import Journal, write_project
from tests.mpi.jobs import FIT, JOURNAL, run

MPIRUN = "mpirun -np 2"
SMALL = "conf=mlp trainer.max_epochs=1 task.model.width=16"
WEIGHTS = "checkpoints/last/weights.safetensors"


def same_weights(one: Path, other: Path) -> None:
    """Compare what two runs ended with, in float32."""
    ours, theirs = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a fit on two ranks of mpirun, with a timeline."""
    folder = tmp_path_factory.mktemp("recorded")
    done = run(
        f"{MPIRUN} {FIT} {SMALL} run_dir=run 'callbacks=[checkpoint,timeline,elastic]'", folder
    )
    assert done.code == 0, done.text
    return folder, done.text


def test_ranks_of_mpirun_train_together(recorded: tuple[Path, str]) -> None:
    """The banner, once, names two ranks of Horovod; elastic is off, in words;
    what is printed is plain text in a pipe.
    """
    folder, text = recorded
    assert text.count("engine         horovod, 2 ranks") == 1 and text.count("epoch 1/1") == 1
    assert text.count("Elastic is off: ranks of MPI cannot be replaced.") == 1
    assert "\x1b" not in text and "\r" not in text.replace("\r\n", "\n")
    assert (folder / "run" / "metrics.csv").exists()


def test_a_timeline_of_mpi_is_reported(recorded: tuple[Path, str]) -> None:
    """Both ranks' steps are recorded, with Horovod's sums on MPI."""
    done = run("python -m trainkit timeline run", recorded[0])
    assert done.code == 0, done.text
    assert (
        re.search(r"Steps 20 to 22 on 2 ranks \(horovod, cpu\)", done.out)
        and "exposed communication" in done.out
    )


def test_a_process_set_trains_while_the_others_wait(
    recorded: tuple[Path, str], tmp_path: Path
) -> None:
    """Two of three ranks train as two ranks do, and the third ends without an error."""
    done = run(f"mpirun -np 3 {FIT} {SMALL} run_dir=run engine.process_set=[0,1]", tmp_path)
    assert done.code == 0, done.text
    assert done.text.count("engine         horovod, 2 ranks") == 1
    same_weights(tmp_path / "run", recorded[0] / "run")


def test_an_error_of_one_rank_ends_the_job(tmp_path: Path) -> None:
    """Its message comes once, and no rank waits for the others."""
    write_project(tmp_path)
    done = run(f"{MPIRUN} {FIT} {JOURNAL} task.pause_s=0 task.fails_at=3", tmp_path)
    assert done.code not in (0, 75)
    assert done.text.count("ValueError: a mistake of the user's") == 1, done.text
    assert max(line["step"] for line in Journal(tmp_path).lines()) == 3
