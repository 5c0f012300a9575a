"""Several runs from one command: values, failures, the metric, and the record of all.
No run trains here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainkit.cli.run import main
from trainkit.config import compose
from trainkit.config.compose import ComposedJob
from trainkit.config.of_run import OVERRIDES
from trainkit.config.sweep import Sweep, jobs_of
from trainkit.errors import ConfigError, Preempted, TrainkitError
from trainkit.extensions.reports.show.files import read_goal
from trainkit.run.goal import Goal

GRID = ["-m", "conf=mlp", "task.model.width=32,48,64", "run_dir=r"]


def work(job: ComposedJob) -> dict[str, float]:
    """Fail at one width; return a metric of the others."""
    width = job.config["task"]["model"]["width"]
    if width == 48:
        raise RuntimeError("boom")
    return {"val/acc": width / 100}


def sweep(arguments: list[str], work: Any = work) -> tuple[Sweep, BaseException | None]:
    """Run a sweep; return it and the error that ended it."""
    ended: list[Sweep] = []
    try:
        compose.run("fit", arguments, True, work, ended.append)
    except (TrainkitError, Preempted) as error:
        return ended[0], error
    return ended[0], None


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)


def test_lines_of_a_sweep_show_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """Without what trainkit adds for Hydra."""
    sweep(GRID, lambda job: {})
    out = capsys.readouterr().out
    assert "#0 : conf=mlp task.model.width=32 run_dir=r\n" in out and "++" not in out


def test_a_failed_run_is_recorded_and_the_others_continue(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All runs have a note with their folders; the command fails at its end."""
    done, error = sweep(GRID)
    assert [trial.run_dir for trial in done.trials()] == [
        Path("r", str(i)).absolute() for i in range(3)
    ]
    assert (done.trials()[1].state.name, done.trials()[1].state.error) == (
        "failed",
        "RuntimeError: boom",
    )
    assert "Error in run 1: Traceback" in capsys.readouterr().err
    assert isinstance(error, TrainkitError) and "failed; the table above" in str(error)
    assert "task.model.width=48" in Path("r/1/.hydra/overrides.yaml").read_text()
    assert done.goal == Goal("val/acc", "max") == read_goal(Path("r"))  # of ModelCheckpoint


def test_an_earlier_sweep_in_the_folder_is_not_in_the_record() -> None:
    """Its runs stay, but are no runs of this one."""
    sweep(GRID)
    done, _ = sweep(["-m", "conf=mlp", "task.model.width=32,64", "run_dir=r"])
    assert [trial.number for trial in done.trials()] == [0, 1]


def test_a_sweep_in_another_order_resumes_no_neighbour() -> None:
    """Where a run's number has other values now, resume=auto is refused before any run; a changed
    setting that is not swept is not.
    """
    widths = ("32", "48")
    for number, width in enumerate(widths):
        file = Path(f"r/{number}/.hydra/overrides.yaml")
        file.parent.mkdir(parents=True)
        file.write_text(f"- conf=mlp\n- trainer.max_epochs=1\n- ++task.model.width={width}\n")
        Path(f"r/{number}/checkpoints").mkdir()
    same = ["-m", "conf=mlp", "run_dir=r", "resume=auto", "trainer.max_epochs=2"]
    for order in (("32", "48"), ("32", "48", "64")):
        done, _ = sweep([*same, f"task.model.width={','.join(order)}"], lambda job: {"val/acc": 1})
        assert len(done.trials()) == len(order)
    for order in (("48", "32"), ("48",)):
        with pytest.raises(
            ConfigError, match="0 holds checkpoints of task.model.width=32; in this"
        ):
            compose.run(
                "fit", [*same, f"task.model.width={','.join(order)}"], True, work, lambda done: None
            )


def test_a_sweep_that_was_killed_resumes_once_more() -> None:
    """A setting that is not swept has two values in its runs then; quotes are no other value."""
    kept: list[str] = []

    def killed_in_run_0(job: ComposedJob) -> dict[str, float]:
        folder = Path(job.config["run_dir"])
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / OVERRIDES).parent.mkdir(exist_ok=True)
        (folder / OVERRIDES).write_text(job.of_hydra[OVERRIDES])
        kept.append(folder.name)
        if job.config["trainer"]["max_epochs"] == 2:
            raise Preempted("killed")
        return {"val/acc": 1}

    def start(epochs: int, names: str) -> None:
        given = f"callbacks.checkpoint.filename={names}", f"trainer.max_epochs={epochs}"
        sweep(["-m", "conf=mlp", "run_dir=r", "resume=auto", *given], killed_in_run_0)

    start(1, "'a','b'")
    start(2, "'a','b'")
    assert kept == ["0", "1", "0"]
    start(3, "a,'b'")
    assert kept == ["0", "1", "0", "0", "1"]


def test_a_sweep_over_all_names_of_a_group() -> None:
    """`glob(*)` is Hydra's: each config of the group."""
    seen: list[str] = []
    compose.run(
        "fit",
        ["-m", "conf=mlp", "lr=glob(*)"],
        True,
        lambda job: seen.append(job.config["lr"]["_target_"]),
    )
    assert len(set(seen)) == len(seen) == 5


def test_an_unknown_metric_ends_the_sweep() -> None:
    """After the first run, with the names that it logged."""
    done, error = sweep([*GRID, "optimized_metric=val/accc"])
    assert isinstance(error, ConfigError) and "Did you mean 'val/acc'?" in str(error)
    assert len(done.trials()) == 1


def test_a_signal_ends_the_sweep() -> None:
    """A preempted run is not one of several failures."""

    def preempted(job: ComposedJob) -> dict[str, float]:
        raise Preempted("SIGTERM")

    done, error = sweep(GRID, preempted)
    assert isinstance(error, Preempted)
    assert len(done.trials()) == 1


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["hydra/launcher=joblib"], "hydra/launcher=joblib is for several runs: add -m"),
        (["optimizer.lr=interval(0.1,1)"], "-m hydra/sweeper=optuna"),
        (["-m", "optimizer.lr=interval(0.1,1)"], "has no list of values"),
        (["-m", "data.batch_size=glob(*)"], "matches no config, so there is no run"),
        (
            ["-m", "hydra.sweeper.params={optimizer.lr:'0.1,0.2'}"],
            "write its keys themselves, with -m: optimizer.lr=0.1,0.2",
        ),
        (["-m", "hydra.sweeper.params.optimizer.lr=choice(0.1,0.2)"], "write its keys"),
        (["-m", "--cfg", "job"], "Leave one out"),
        (
            ["-m", "hydra/sweeper=optuna", "callbacks.checkpoint.monitor=null"],
            "optimized_metric is missing",
        ),
        (
            ["-m", "hydra/sweeper=optuna", "optimized_metric=val/loss"],
            "hydra.sweeper.direction is missing",
        ),
        (
            ["-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=up"],
            "it must be minimize or maximize",
        ),
        (
            [
                "-m",
                "hydra/sweeper=optuna",
                "optimizer.lr=interval(0,1)",
                "task.model.width=choice(1,0)",
            ],
            "width is 0",
        ),
    ],
)
def test_a_wrong_request_is_explained(
    typed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first run, with what to type."""
    assert main("fit", ["conf=mlp", *typed]) == 2
    assert said in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_values_are_checked_before_the_first_run() -> None:
    """A grid: all combinations. A sweeper that draws its values:
    each once, and both ends of an interval.
    """
    typed = ["a=1,2", "b=range(0,3)"]
    assert len(jobs_of(typed, is_grid=True)) == 6
    assert jobs_of([*typed, "c=tag(log,interval(1e-3,1))"], is_grid=False) == [
        ["a=1", "b=0", "c=0.001"],
        ["a=2", "b=1", "c=1.0"],
        ["a=1", "b=2", "c=0.001"],
    ]


def test_a_missing_plugin_is_named() -> None:
    """With the package to install; a name that no plugin has, with the names that there are."""
    code = (
        "import sys; sys.modules['hydra_plugins'] = None\nfrom trainkit.cli.run import main\nfor"
        " typed in ('hydra/sweeper=optuna', 'hydra/launcher=submitit_slurm',"
        " 'hydra/launcher=jobli'):\n    assert main('fit', ['-m', 'conf=mlp', typed]) == 2"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second, third = done.stderr.splitlines()
    assert (
        "pip install hydra-optuna-sweeper, or all of trainkit's: pip install 'trainkit[sweeps]'"
        in first
    )
    assert "pip install hydra-submitit-launcher" in second
    assert "hydra/launcher is 'jobli', and there is none" in third


# What W&B's agent makes of a sweep's parameters with ${args_no_hyphens}: f"{name}={value}", without
# a shell.
AGENTS = {
    "optimizer.lr": 1e-05,
    "task.model.width": 48,
    "trainer.sync_batchnorm": True,
    "run_dir": "runs/my sweep",
    "seed": 7,
}


def test_the_arguments_of_an_agent_are_overrides() -> None:
    """Numbers, also as 1e-05, booleans as Python writes them,
    and text with spaces arrive as such.
    """
    jobs: list[ComposedJob] = []
    assert (
        main("fit", ["conf=mlp", *(f"{key}={value}" for key, value in AGENTS.items())], jobs.append)
        == 0
    )
    config = jobs[0].config
    assert (config["optimizer"]["lr"], config["task"]["model"]["width"], config["seed"]) == (
        1e-05,
        48,
        7,
    )
    assert config["trainer"]["sync_batchnorm"] is True
    assert config["run_dir"] == "runs/my sweep"


@pytest.mark.parametrize("quoted", ["'runs/a,b'", '"runs/a,b"'])
def test_quoted_text_is_one_value(quoted: str) -> None:
    """A comma in quotes separates nothing."""
    jobs: list[ComposedJob] = []
    assert main("fit", ["conf=mlp", f"run_dir={quoted}"], jobs.append) == 0
    assert jobs[0].config["run_dir"] == "runs/a,b"
