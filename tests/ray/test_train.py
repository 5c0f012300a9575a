"""A Task in Ray Train's TorchTrainer: a world of all its workers, reports with checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.jobs import free_port
from tests.helpers.launching import Command


def test_workers_of_a_torch_trainer_are_one_world(
    cluster: str, command: Command, tmp_path: Path
) -> None:
    """Two workers with engine=auto train together on torch.distributed; metrics and checkpoint
    arrive in the Result, and the weights are those of two ranks of torchrun."""
    done = command(f"python -m tests.ray.train_job {tmp_path}/train", RAY_TRAIN_V2_ENABLED="1")
    assert done.code == 0, done.text[-3000:]
    (line,) = [line for line in done.out.splitlines() if line.startswith("RESULT")]
    result = json.loads(line.removeprefix("RESULT "))
    assert (result["world"], result["engine"]) == (2, "ddp")
    assert (result["metrics"]["epoch"], result["metrics"]["step"]) == (2, 6)
    assert 0 < result["metrics"]["val/loss"] < 1
    assert (Path(result["checkpoint"]) / "manifest.json").is_file()
    expected = [0.7369368076324463, 0.7483100891113281, 0.9795827269554138, -0.06618677824735641]
    assert result["weights"] == pytest.approx(expected, abs=1e-6)


def test_workers_leave_a_node_that_drains(cluster: str, command: Command, tmp_path: Path) -> None:
    """Ray announces that the workers' node goes:
    they report a checkpoint, start on the other node, and take each step once.
    """
    folder = tmp_path / "train"
    line = f"python -m tests.ray.train_job {folder} drain {free_port()}"
    done = command(line, 400, RAY_TRAIN_V2_ENABLED="1", RAY_ADDRESS="", OMP_NUM_THREADS="1")
    assert done.code == 0, done.text[-3000:]
    (line,) = [line for line in done.out.splitlines() if line.startswith("RESULT")]
    result = json.loads(line.removeprefix("RESULT "))
    assert (result["world"], result["metrics"]["epoch"]) == (2, 20)
    assert (folder / "node").read_text() != (folder / "drained").read_text()
    for rank in (0, 1):
        steps = [int(line) for line in (folder / f"steps-{rank}.txt").read_text().splitlines()]
        assert steps == list(range(result["metrics"]["step"]))
