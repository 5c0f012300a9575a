"""Commands on an existing run start from the run's own config,
and say what the command line changes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from trainkit.cli.run import main
from trainkit.config.compose import ComposedJob
from trainkit.config.of_run import OVERRIDES, is_own, read_overrides

_RUN = ["conf=mlp", "run_dir=r", "task.model.width=48", "data.batch_size=20", "seed=5"]


def job_of(command: str, *arguments: str) -> ComposedJob:
    """Return the job that a command line makes."""
    jobs: list[ComposedJob] = []
    assert main(command, arguments, jobs.append) == 0
    return jobs[0]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder `r` of a run, with its files and two checkpoints,
    in an empty current folder.
    """
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "r"
    for name, text in job_of("fit", *_RUN, "trainer.lr_warmup_steps=3").files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in ("best", "last"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    return folder


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Return the keys at the top that have different values."""
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


@pytest.mark.parametrize(
    "arguments", [["run_dir=r"], ["run_dir=r", "conf=mlp"], ["ckpt_path=r/checkpoints/best"]]
)
def test_an_evaluation_has_the_runs_config(arguments: list[str], run_dir: Path) -> None:
    """Every setting of the run holds, also if its conf is named again;
    the weights are the best ones.
    """
    job = job_of("validate", *arguments)
    assert differing(job.config, job_of("fit", *_RUN, "trainer.lr_warmup_steps=3").config) == {
        "ckpt_path"
    }
    assert job.config["ckpt_path"] in ("best", "r/checkpoints/best")
    assert job.notes == ()


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_a_run_without_trained_weights_is_not_evaluated(
    command: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run whose checkpoints are elsewhere the best one is read; one that has left none is
    refused, unless the first weights are asked for.
    """
    shutil.rmtree(run_dir / "checkpoints")
    assert main(command, ["run_dir=r"]) == 2
    assert "The run in 'r' has left no checkpoint, so" in capsys.readouterr().err
    assert job_of(command, "run_dir=r", "ckpt_path=null").config["ckpt_path"] is None
    elsewhere = ["callbacks=checkpoint", "callbacks.checkpoint.dirpath=elsewhere"]
    for name, text in job_of("fit", *_RUN, *elsewhere).files.items():
        (run_dir / name).write_text(text)
    assert job_of(command, "run_dir=r").config["ckpt_path"] == "best"


def test_several_evaluations_of_a_run_have_its_checkpoints(run_dir: Path) -> None:
    """With -m each has a folder of its own in the run's, which has none; their names lead to the
    run's, as a folder that is typed does.
    """
    jobs: list[ComposedJob] = []
    words = ["-m", "run_dir=r", "ckpt_path=best,last,r/checkpoints/last"]
    assert main("validate", words, jobs.append) == 0
    expected = [f"r/checkpoints/{name}" for name in ("best", "last", "last")]
    assert [job.config["ckpt_path"] for job in jobs] == expected
    assert [job.config["run_dir"] for job in jobs] == ["r/0", "r/1", "r/2"]
    main("test", ["-m", "run_dir=r", "data.batch_size=8,16"], jobs.append)
    assert [job.config["ckpt_path"] for job in jobs[3:]] == ["r/checkpoints/best"] * 2


def test_changes_are_named_key_by_key(run_dir: Path) -> None:
    """An override changes what refers to its key too, and each change is named with both values."""
    job = job_of(
        "test", "run_dir=r", "data.batch_size=8", "ckpt_path=last", "optimizer.momentum=0.5"
    )
    assert set(job.notes) == {
        "data.batch_size: 20 -> 8",
        "optimizer.momentum: 0.9 -> 0.5",
        "task.optimizer.momentum: 0.9 -> 0.5",
    }
    assert job.config["ckpt_path"] == "last"


def test_a_group_is_replaced_as_a_whole(run_dir: Path) -> None:
    """Nothing of the run's data is left in other data."""
    job = job_of("predict", "run_dir=r", "data=synthetic", "data.num_samples=64")
    plain = job_of("fit", "conf=mlp", "data=synthetic", "data.num_samples=64").config["data"]
    assert job.config["data"].keys() == plain.keys()
    assert (job.config["data"]["num_samples"], job.config["data"]["batch_size"]) == (
        64,
        plain["batch_size"],
    )
    assert "data._target_: recipes.digits.Digits -> recipes.synthetic.Synthetic" in job.notes


def test_another_conf_replaces_the_runs(run_dir: Path) -> None:
    """If the command line names another config, it holds, and the differences are named."""
    job = job_of("validate", "conf=resnet18", "run_dir=r", "ckpt_path=null")
    assert job.config["task"] == job_of("fit", "conf=resnet18").config["task"]
    assert any(note.startswith("seed: 5 -> ") for note in job.notes)
    assert job.config["ckpt_path"] is None


def test_a_resumed_fit_records_what_was_typed_for_its_first_start(run_dir: Path) -> None:
    """The file of overrides makes the run again;
    the resume itself is not part of it, its changes are.
    """
    job = job_of("fit", "run_dir=r", "ckpt_path=last", "data.batch_size=8")
    (run_dir / OVERRIDES).write_text(job.files[OVERRIDES])
    assert read_overrides(run_dir) == {
        "task.model.width": "48",
        "seed": "5",
        "trainer.lr_warmup_steps": "3",
        "conf": "mlp",
        "data.batch_size": "8",
        "run_dir": "r",
    }


def test_a_fit_resumes_with_the_runs_config(run_dir: Path) -> None:
    """Without a conf a fit in a run's folder has the run's config;
    with one, the command line alone holds.
    """
    assert job_of("fit", "run_dir=r", "resume=auto").config["data"]["batch_size"] == 20
    assert job_of("fit", "conf=mlp", "run_dir=r").config["data"]["batch_size"] == 32


def test_trust_is_not_taken_from_a_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run's folder may come from anywhere: what it trusts is left out."""
    with (run_dir / ".hydra" / "config.yaml").open("a") as file:
        file.write("trust: [os]\n")
    assert not job_of("validate", "run_dir=r").config.get("trust")


def test_a_broken_config_is_named(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is no config ends the command with code 2 and its name."""
    (run_dir / "config.yaml").write_text("a: [1\n")
    assert main("validate", ["run_dir=r"]) == 2
    assert "r/config.yaml, line 2, column 1: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["validate", "fit"])
def test_a_folder_that_is_no_run_is_named(
    command: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt run_dir is the mistake that is reported, and not a missing conf."""
    assert main(command, ["run_dir=rr"]) == 2
    assert "run_dir is 'rr', which holds no config.yaml of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ckpt_path", "run_dir", "expected"),
    [
        ("last", "runs/mine", True),
        ("runs/mine/checkpoints/step-5", "runs/mine", True),
        ("runs/other/../mine/checkpoints/last", "./runs/mine", True),
        ("runs/mine/../other/checkpoints/last", "runs/mine", False),
        ("runs/mine-2/checkpoints/last", "runs/mine", False),
        ("s3://bucket/runs/other/last", ".", False),
        ("s3://bucket/runs/other/last", "/", False),
    ],
)
def test_a_checkpoint_is_a_runs_own_or_anothers(
    ckpt_path: str, run_dir: str, expected: bool
) -> None:
    """Whichever way its path is written; a URL is in no folder."""
    assert is_own(ckpt_path, run_dir) is expected
