"""Sweeps as a user types them: optuna, launchers, failures, ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.launching import Command, Done

SHORT = "trainer.max_steps=5 trainer.limit_val_batches=2 logger=csv"
DRAWN = (
    "hydra/sweeper=optuna 'optimizer.lr=tag(log,interval(1e-3,1))' 'task.model.width=choice(8,16)'"
    " hydra.sweeper.n_trials=3"
)
BREAKS = """
from recipes.image_classifier import ImageClassifier

class Breaks(ImageClassifier):
    def training_step(self, batch, batch_idx):
        if self.model[1].out_features == 16:
            raise RuntimeError("boom")
        return super().training_step(batch, batch_idx)
"""


def states(command: Command) -> list[str]:
    """Return the states that `trainkit runs` prints."""
    done = command("python -m trainkit runs runs/s --json")
    assert done.code == 0, done.text
    return [run["state"] for run in json.loads(done.out)["runs"]]


def best_command(done: Done) -> str:
    """Return the line that repeats the best run."""
    return re.findall(r"repeat  (.*)", done.out)[0]


def test_optuna_draws_values(command: Command) -> None:
    """Three runs within the bounds; the best one's line repeats it;
    the same start draws the same values.
    """
    done = command(
        f"python -m trainkit fit -m conf=mlp {DRAWN} optimized_metric=val/acc run_dir=runs/s"
        f" {SHORT}"
    )
    assert done.code == 0, done.text
    assert "Directions: ['maximize']" in done.out and states(command) == ["done"] * 3
    line = best_command(done)
    rate = re.search(r"optimizer.lr=(\S+) task.model.width=(8|16)", line)
    assert rate and 1e-3 <= float(rate[1]) <= 1
    again = command(f"{line} run_dir=runs/again")
    assert again.code == 0, again.text


def test_a_failed_run_does_not_end_the_others(command: Command, tmp_path: Path) -> None:
    """Its error is in the table; the exit code is 1. For optuna it is a trial without a value."""
    (tmp_path / "mine.py").write_text(BREAKS)
    failing = f"conf=mlp task._target_=mine.Breaks run_dir=runs/s {SHORT}"
    done = command(f"python -m trainkit fit -m {failing} task.model.width=16,8")
    assert (done.code, states(command)) == (1, ["failed", "done"]), done.text
    assert re.search(r"^error +run 0: RuntimeError: boom$", done.out, re.MULTILINE), done.text
    assert done.err.rstrip().endswith("Error: 1 of 2 runs failed; the table above has the errors.")
    done = command(
        f"python -m trainkit fit -m {failing} hydra/sweeper=optuna hydra.sweeper.n_trials=1"
        " task.model.width=16"
    )
    assert (done.code, "1 of 1 run failed" in done.err) == (1, True), done.text


@pytest.mark.parametrize("launcher", ["joblib hydra.launcher.n_jobs=2", "submitit_local"])
def test_a_launcher_runs_them_in_other_processes(launcher: str, command: Command) -> None:
    """In one folder, named after the time at which the command started."""
    done = command(f"python -m trainkit fit -m conf=mlp hydra/launcher={launcher} seed=1,2 {SHORT}")
    assert done.code == 0, done.text
    found = command("python -m trainkit runs runs/mlp --json")
    runs = json.loads(found.out)["runs"]
    assert [run["state"] for run in runs] == ["done", "done"]
    assert len({Path(run["folder"]).parent for run in runs}) == 1


def test_slurm_settings_are_shown(command: Command) -> None:
    """Without Slurm its launcher can only be configured."""
    done = command(
        "python -m trainkit fit conf=mlp hydra/launcher=submitit_slurm hydra.launcher.partition=gpu"
        " --cfg hydra"
    )
    assert (done.code, "partition: gpu" in done.out) == (0, True), done.text


@pytest.mark.parallel
def test_all_ranks_run_the_same_trials(command: Command) -> None:
    """Each rank draws the values itself, by one seed."""
    line = f"horovodrun -np 2 python -m trainkit fit -m conf=mlp {DRAWN} run_dir=runs/s {SHORT}"
    done = command(line)
    assert done.code == 0, done.text
    assert states(command) == ["done"] * 3
    assert best_command(done).startswith("horovodrun -np 2 python -m trainkit fit conf=mlp ")
    refused = command(line + " hydra/launcher=joblib")
    assert refused.code != 0 and "starts each run in a process of its own" in refused.text
