"""Elastic training of split weights under `python -m trainkit launch`: a replica that loses a rank comes
back as a whole, while the others train (engine=fsdp engine.replicas=N callbacks=elastic).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.jobs import ROOT, WORKERS
from tests.faults.test_elastic import Ended, read, survivors
from tests.faults.workers.replicas_job import SAMPLES, STEP
from tests.helpers.launching import run_command

pytestmark = pytest.mark.parallel

JOB = WORKERS / "replicas_job.py"
EPOCHS = 4
DIES = [3, 5]  # rank and step
LAYOUTS: dict[str, dict[str, Any]] = {
    "units": {"replicas": 2, "shard": ["Linear"]},
    "tensor": {
        "replicas": 2,
        "tensor": 2,
        "tensor_plan": {"model.0": "colwise", "model.2": "rowwise"},
    },
}


def start(tmp_path: Path, launch: str, **settings: Any) -> Ended:
    """Run a job to its end."""
    tmp_path.mkdir(exist_ok=True)
    text = json.dumps({"epochs": EPOCHS, "width": 128, "optimizer": "AdamW"} | settings)
    line = f"{launch} python {JOB} {tmp_path / 'run'} '{text}'"
    done = run_command(line, tmp_path, 300, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    return read(done.code, done.text, tmp_path / "run")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How the same fit ends in one process to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    alone = start(folder, "", engine="single", options={}, pace_s=0.0, waits_for=1)
    (end,) = alone.ends.values()
    return end


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replica_that_loses_a_rank_comes_back_while_the_other_trains(
    tmp_path: Path, undisturbed: dict[str, Any], layout: str
) -> None:
    """A rank is killed in the midst of a backward: the other replica takes that step again in its
    processes without a commit, and the new one takes its state from it, for there is no checkpoint.
    """
    launch = "python -m trainkit launch -np 4 --min-np 2 --max-np 4 --"
    settings = {"options": LAYOUTS[layout], "dies": DIES, "commit": 1000, "checkpoints": False}
    ended = start(tmp_path, launch, pace_s=0.08, **settings)
    assert ended.code == 0, ended.text
    assert ended.sizes == [4, 2, 4] and len(survivors(ended)) == 2, ended.text
    assert "its replica is not whole: it lost worker" in ended.text, ended.text
    steps: dict[int, list[int]] = {}
    for own in ended.lines.values():
        for line in own:
            steps.setdefault(line["generation"], []).append(line["step"])
    assert max(steps[1]) == min(steps[2]) == DIES[1], "no step is lost"
    assert min(steps[3]) == max(steps[2]) + 1, "and none is taken twice for a replica that comes"
    assert len(ended.ends) == 4
    for end in ended.ends.values():
        assert end["step"] == EPOCHS * SAMPLES // STEP
        assert end["seen"] == pytest.approx([EPOCHS] * SAMPLES, abs=1e-9), "each sample counts once"
        assert end["weights"] == pytest.approx(undisturbed["weights"], rel=0, abs=1e-12)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_lost_host_resumes_from_the_memory_of_another_one(tmp_path: Path) -> None:
    """All processes of one of two hosts are killed in a backward: the ranks start again and resume from
    the copies, though all checkpoints are spoilt, and end with the bits of a run without the loss.
    """
    hosts = "-np 2 -H localhost:1,127.0.0.1:1"
    launch = f"python -m trainkit launch {hosts} --"
    settings = {"options": {"replicas": 1}, "copies": 1, "commit": 3, "waits_for": 2, "pace_s": 0.0}
    (end, *_) = start(tmp_path / "undisturbed", launch, **settings).ends.values()
    ended = start(tmp_path / "lost", launch, dies=[1, 20], host_dies=True, **settings)
    assert ended.code == 0, ended.text
    assert ended.sizes == [2, 2], ended.text
    resumed = "Resumed from the memory of peers at step 18: "
    assert resumed in ended.text and ", 0 bytes of checkpoints." in ended.text
    assert "is damaged" not in ended.text and "no whole checkpoint" not in ended.text
    for own in ended.ends.values():
        assert own == end, "bit for bit"
        assert own["seen"] == pytest.approx([EPOCHS] * SAMPLES, abs=1e-9), "each sample counts once"


def test_a_hung_rank_of_the_only_replica_is_replaced(tmp_path: Path) -> None:
    """No other replica waits for its sums: the rank that shares the weights with it says that it waits
    for them, in FSDP2's own collectives.
    """
    hosts = "-np 2 -H localhost:1,127.0.0.1:1"
    hangs = {"do": "hang", "rank": 1, "step": 10}
    settings = {"options": {"replicas": 1}, "copies": 1, "waits_for": 2, "pace_s": 0.0}
    ended = start(
        tmp_path, f"python -m trainkit launch {hosts} --", faults=[hangs], stall_s=6, **settings
    )
    assert ended.code == 0, ended.text
    assert ended.sizes == [2, 2], ended.text
    assert "has waited for the weights of the other ranks" in ended.text, ended.text
    for own in ended.ends.values():
        assert own["seen"] == pytest.approx([EPOCHS] * SAMPLES, abs=1e-9), "each sample counts once"


def test_a_rank_of_the_only_replica_leaves_with_a_checkpoint(tmp_path: Path) -> None:
    """A rank of one of two replicas has SIGTERM, and the other replica is lost before it leaves: no
    commit is left, and there is no checkpoint of an epoch yet. The run resumes where it left.
    """
    launch = "python -m trainkit launch -np 4 --min-np 2 --max-np 4 --"
    left = {"do": "terminate", "rank": 0, "step": DIES[1] - 1}
    settings = {"options": {"replicas": 2}, "dies": DIES, "waits_for": 2, "commit": 1000}
    ended = start(tmp_path, launch, faults=[left], pace_s=0.3, **settings)
    assert ended.code == 0, ended.text
    assert "left (exit code 75); no rank is left" in ended.text, ended.text
    steps: dict[int, list[int]] = {}
    for own in ended.lines.values():
        for line in own:
            steps.setdefault(line["generation"], []).append(line["step"])
    assert min(steps[3]) > DIES[1], "the run did not begin again"
    for end in ended.ends.values():
        assert end["seen"] == pytest.approx([EPOCHS] * SAMPLES, abs=1e-9), "each sample counts once"
