"""`python -m trainkit check-resume` reports a run that resumes as equal,
and names what differs in one that does not.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.launching import Command

# A user's own task: dropout and batch norm, and on demand something that a checkpoint cannot know
# of.
TASK = """
import torch
from torch import nn

import trainkit
from trainkit.run import parts
from trainkit.launch.environment import read_launcher

UNSEEDED = torch.Generator()
UNSEEDED.seed()
restore = parts.set_random_state


class Mine(trainkit.Task):
    def __init__(self, fault: str = "none") -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.fault, self.counter, self.generator = fault, 0, torch.Generator().manual_seed(1)
        if fault == "rank 1" and read_launcher().rank == 1:
            parts.set_random_state = lambda state: None  # as if the checkpoint did not have it

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.counter += 1
        scale = 1.0
        if self.fault == "counter":
            scale = 1 / self.counter
        elif self.fault == "generator":
            scale = torch.rand((), generator=self.generator)
        elif self.fault == "unseeded":
            scale = torch.rand((), generator=UNSEEDED)
        loss = scale * nn.functional.mse_loss(self.model(x), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def train_dataloader(self):
        x = torch.randn(52, 3, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)
"""
CONF = """
defaults: [_base, _self_]
task:
  _target_: mine.Mine
  fault: none
trainer:
  max_epochs: 4
  log_every_n_steps: 2
callbacks:
  checkpoint:
    _target_: trainkit.callbacks.ModelCheckpoint
    dirpath: kept
"""
# name -> what the result's row says
Rows = dict[str, str]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The user's folder with a task and a config of their own."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(CONF)
    (tmp_path / "mine.py").write_text(TASK)
    return tmp_path


def rows(text: str) -> Rows:
    """Return the table's rows."""
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in text.splitlines()
        if line.startswith("│")
    ]
    return {what: result for what, _, result in cells}


def test_a_shipped_config_resumes(command: Command, tmp_path: Path) -> None:
    """conf=mlp, killed inside its first epoch, resumes to the same bits in every part,
    and no file is left.
    """
    (tmp_path / "there").mkdir()
    done = command(
        "python -m trainkit check-resume conf=mlp kill_at=12 steps=14",
        TMPDIR=str(tmp_path / "there"),
    )
    assert done.code == 0, done.text
    assert {"weights", "optimizer state", "random states", "logged values", "samples"} <= set(
        rows(done.out)
    )
    assert set(rows(done.out).values()) == {"equal"}
    assert "EQUAL: the run that was killed in step 12" in done.out
    assert list((tmp_path / "there").glob("trainkit-*")) == []
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_users_own_task_resumes_over_an_epochs_end(command: Command, mine: Path) -> None:
    """A task with dropout, batch norm and Adam resumes over an epoch's end,
    and the user's own checkpoints stay.
    """
    done = command("python -m trainkit check-resume conf=mine kill_at=11 save_at=9 steps=27")
    assert done.code == 0, done.text
    assert set(rows(done.out).values()) == {"equal"}
    assert "buffers" in rows(done.out)
    assert not (mine / "kept").exists()


@pytest.mark.parametrize("fault", ["counter", "generator"])
def test_what_a_task_keeps_to_itself_is_found(fault: str, command: Command, mine: Path) -> None:
    """A counter or generator outside of the Task's buffers is lost,
    and the first difference is named.
    """
    done = command(
        f"python -m trainkit check-resume conf=mine task.fault={fault} kill_at=11 steps=13",
        TMPDIR=str(mine),
    )
    assert done.code == 1, done.text
    table = rows(done.out)
    assert table["weights"].startswith("FIRST DIFFERENCE: weight model.0.bias: ")
    assert table["buffers"].startswith("FIRST DIFFERENCE: buffer model.1.running_mean: ")
    assert table["optimizer state"].startswith(
        "FIRST DIFFERENCE: optimizer 0, exp_avg of model.0.weight: "
    )
    assert re.match(
        r"FIRST DIFFERENCE: row \d+ \(step 1\d\), train/loss_step: ", table["logged values"]
    )
    assert (table["samples"], table["counters"], table["random states"]) == (
        "equal",
        "equal",
        "equal",
    )
    (kept,) = mine.glob("trainkit-check-resume-*")
    assert f"are in {kept}" in done.out


def test_a_run_that_is_never_twice_the_same_is_recognised(command: Command, mine: Path) -> None:
    """If two runs differ before the kill, the resume is not blamed."""
    done = command(
        "python -m trainkit check-resume conf=mine task.fault=unseeded kill_at=6 steps=7",
        TMPDIR=str(mine),
    )
    assert done.code == 1
    assert (
        "DIFFERENT, but not because of the resume: two runs of the same settings already differ at"
        " step 4" in done.out
    ), done.text


@pytest.mark.parallel
@pytest.mark.parametrize("engine", ["auto", "ddp"])
def test_two_ranks_resume(engine: str, command: Command, mine: Path) -> None:
    """At 2 ranks, on Horovod and on torch.distributed,
    both ranks resume with their random states and samples.
    """
    done = command(
        f"python -m trainkit check-resume conf=mine engine={engine} kill_at=9 ranks=2",
        timeout_s=400,
    )
    assert done.code == 0, done.text
    assert set(rows(done.out).values()) == {"equal"}


@pytest.mark.parallel
def test_random_numbers_that_one_rank_loses_are_named(command: Command, mine: Path) -> None:
    """If rank 1 does not get its random state back, rank 1's random state is named."""
    line = (
        "python -m trainkit check-resume conf=mine kill_at=9 steps=10 ranks=2 'task.fault=\"rank"
        " 1\"'"
    )
    done = command(line, timeout_s=400, TMPDIR=str(mine))
    assert done.code == 1, done.text
    assert rows(done.out)["random states"].startswith(
        "FIRST DIFFERENCE: random state of rank 1 (torch): "
    )


@pytest.mark.parallel
def test_other_ranks_resume_with_the_same_problem(command: Command) -> None:
    """From 2 ranks to 1 the global batch, the rate, the samples and the counters stay,
    and the weights agree to rounding.
    """
    done = command("python -m trainkit check-resume conf=mlp kill_at=17 ranks=2,1", timeout_s=400)
    assert done.code == 0, done.text
    assert "trainer.global_batch_size=64" in done.out
    assert "trainer.lr_reference_batch_size=32" in done.out
    table = rows(done.out)
    assert {
        table[what] for what in ("weights", "optimizer state", "schedules", "counters", "samples")
    } == {"equal"}
    assert table["random states"].startswith("not compared")
    assert "0.0001 (float32)" in done.out


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("engine", "ranks", "after"), [("fsdp", "2", "ddp"), ("horovod", "2,1", "fsdp")]
)
def test_another_engine_resumes(engine: str, ranks: str, after: str, command: Command) -> None:
    """From parts of the weights to whole ones and back:
    weights and optimizer state agree to rounding, samples exactly.
    """
    line = (
        f"python -m trainkit check-resume conf=mlp kill_at=12 steps=14 engine={engine}"
        f" ranks={ranks} resume_engine={after}"
    )
    done = command(line, timeout_s=400)
    assert done.code == 0, done.text
    table = rows(done.out)
    assert {
        table[what] for what in ("weights", "optimizer state", "schedules", "counters", "samples")
    } == {"equal"}
    assert f"with engine={after} ended like the uninterrupted run" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("conf=mlp", "kill_at is missing; it must be the step"),
        ("conf=mlp kill_at=soon", "kill_at is 'soon'; it must be a whole number, 2 or more."),
        ("conf=mlp kill_at=5 save_at=5", "save_at is 5; it must be less than kill_at=5"),
        ("conf=mlp kill_at=5 steps=5", "steps is 5; it must be more than kill_at=5"),
        (
            "conf=mlp kill_at=5 trainer.max_steps=5",
            "kill_at is 5; it must be less than trainer.max_steps=5.",
        ),
        (
            "conf=mlp kill_at=5 steps=9 trainer.max_steps=8",
            "steps is 9; it must be trainer.max_steps=8 or less.",
        ),
        ("conf=mlp kill_at=5 ranks=1,2,3", "ranks is '1,2,3'; it must be one number, or two"),
        ("conf=mlp kill_at=5 ranks=2 engine=single", "ranks is 2, but engine=single has one rank."),
        (
            "conf=mlp kill_at=5 resume_engine=fdsp",
            "resume_engine is 'fdsp'; it must be one of single, horovod, ddp, fsdp",
        ),
        (
            "conf=mlp kill_at=5 ranks=2 resume_engine=single",
            "give one rank after the kill: ranks=2,1",
        ),
        ("conf=mlp kill_at=5 keep=perhaps", "keep is 'perhaps'; it must be true or false."),
        (
            "conf=mlp kill_at=5 ckpt_path=last",
            "ckpt_path is 'last', but check-resume starts new runs.",
        ),
        ("conf=mlp kill_at=5 trainer.fast_dev_run=true", "trainer.fast_dev_run is set"),
        ("conf=mlp kill_at=5 -m", "leave -m out"),
        ("conf=mlp kill_at=5 trainer.max_epoch=3", "trainer.max_epoch is not a setting."),
        ("conf=mlp kill_at=5 ranks=2,3", "cannot be divided among 3 ranks in microbatches of 32"),
        (
            "conf=mlp kill_at=5 ranks=2,1 'trainer.accumulate_grad_batches={0: 1, 2: 2}'",
            "the accumulation changes by epoch",
        ),
    ],
)
def test_what_cannot_be_checked_is_refused(
    arguments: str, message: str, command: Command, tmp_path: Path
) -> None:
    """Bad input ends with exit code 2 and one sentence, before anything runs;
    nothing is left behind.
    """
    done = command(f"python -m trainkit check-resume {arguments}", TMPDIR=str(tmp_path))
    assert done.code == 2, done.text
    assert message in done.err
    assert list(tmp_path.glob("trainkit-*")) == []


def test_a_run_that_ends_before_it_could_be_killed(command: Command, tmp_path: Path) -> None:
    """A kill_at after the run's last step is refused as soon as that step is known."""
    line = "python -m trainkit check-resume conf=mlp kill_at=50 trainer.max_epochs=1"
    done = command(line, TMPDIR=str(tmp_path))
    assert done.code == 2
    assert "kill_at is 50, but the run ends by itself after step 45." in done.err, done.text


def test_a_run_that_fails_is_shown(command: Command, mine: Path) -> None:
    """If one of the runs fails, its last lines are shown and the exit code is 1."""
    (mine / "mine.py").write_text(TASK.replace("x, y = batch", 'raise ValueError("broken here")'))
    done = command("python -m trainkit check-resume conf=mine kill_at=5", TMPDIR=str(mine))
    assert done.code == 1
    assert "1/3 the whole run failed (exit code 1):" in done.err, done.text
    assert "ValueError: broken here" in done.err
