"""A Task in Ray Train's TorchTrainer: a world of all its workers, reports with checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.launching import Command


def test_workers_of_a_torch_trainer_are_one_world(cluster: str, command: Command, tmp_path: Path) -> None:
    """Two workers with engine=auto train together on torch.distributed; metrics and checkpoint arrive in the Result, and the
    weights are those of two ranks of torchrun."""
    done = command(f"python -m tests.ray.train_job {tmp_path}/train", RAY_TRAIN_V2_ENABLED="1")
    assert done.code == 0, done.text[-3000:]
    (line,) = [line for line in done.out.splitlines() if line.startswith("RESULT")]
    found = json.loads(line.removeprefix("RESULT "))
    assert (found["world"], found["engine"]) == (2, "ddp")
    assert (found["metrics"]["epoch"], found["metrics"]["step"]) == (2, 6)
    assert 0 < found["metrics"]["val/loss"] < 1
    assert (Path(found["checkpoint"]) / "manifest.json").is_file()
    expected = [0.7369368076324463, 0.7483100891113281, 0.9795827269554138, -0.06618677824735641]
    assert found["weights"] == pytest.approx(expected, abs=1e-6)
