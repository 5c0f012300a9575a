"""Sweeps as a user types them: optuna, launchers, failures, ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.launching import Command, Done
from trainkit.extensions.reports.show.best import number

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
    return str(re.findall(r"repeat  (.*)", done.out)[0])


def best_value(done: Done, metric: str) -> str:
    """Return the last value of the best run, as it is printed."""
    (value,) = re.findall(rf"^best    run \S+: {metric} = (\S+) ", done.out, re.MULTILINE)
    return str(value)


def last(command: Command, folder: str, metric: str) -> str:
    """Return the last value of a run's metric, in the same form."""
    done = command(f"python -m trainkit runs {folder} --json")
    return number(json.loads(done.out)["runs"][0]["metrics"][metric]["last"])


MINE = """
import torch, trainkit

class Mine(trainkit.Task):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.lr, self.model = lr, torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def loss(self, batch):
        return (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

class Data(trainkit.DataModule):
    def train_dataloader(self):
        rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)

    val_dataloader = train_dataloader
"""


def test_a_grid_without_a_monitored_value_names_the_command_that_chooses(
    command: Command, tmp_path: Path
) -> None:
    """That command names the best run, and so does `show`; its command, typed as it is printed,
    trains to the same score. A run that diverges is not the best one.
    """
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(
        "defaults: [_base, _self_]\ntask: {_target_: mine.Mine}\ndata: {_target_: mine.Data}\n"
        "trainer: {max_epochs: 2}\n"
    )
    done = command("python -m trainkit fit -m conf=mine task.lr=1e9,0.01,0.05 run_dir=runs/s")
    assert done.code == 0, done.text
    *_, unknown, choose = done.out.splitlines()
    assert unknown == "best    unknown: no callback of these runs monitors a value to compare by"
    assert choose == "choose  python -m trainkit runs runs/s metric=val/loss mode=min"
    chosen = command(choose.removeprefix("choose"))
    shown = command("python -m trainkit show runs/s/0 runs/s/1 runs/s/2 metric=val/loss mode=min")
    assert best_command(chosen) == best_command(shown)
    assert best_command(chosen) == "python -m trainkit fit conf=mine task.lr=0.05"
    again = command(f"{best_command(chosen)} run_dir=runs/again")
    assert again.code == 0, again.text
    assert last(command, "runs/again", "val/loss") == best_value(chosen, "val/loss")


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
    assert last(command, "runs/again", "val/acc") == best_value(done, "val/acc")


def test_a_failed_run_does_not_end_the_others(command: Command, tmp_path: Path) -> None:
    """It is last in the table, with its error; the exit code is 1. For optuna it is a trial without a value."""
    (tmp_path / "mine.py").write_text(BREAKS)
    failing = f"conf=mlp task._target_=mine.Breaks run_dir=runs/s {SHORT}"
    done = command(f"python -m trainkit fit -m {failing} task.model.width=16,8")
    assert (done.code, states(command)) == (1, ["failed", "done"]), done.text
    assert re.search(r"^│ 1 \*? .*\n│ 0 ", done.out, re.MULTILINE), done.text
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
