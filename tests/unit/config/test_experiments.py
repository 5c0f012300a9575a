"""experiment=NAME, `override` in defaults lists, and hydra/ groups of a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.cli.run import main
from trainkit.config.compose import ComposedJob

HEAD = "# @package _global_\n"
GOOD = HEAD + "defaults:\n  - override /optimizer: adamw\ntrainer: {max_epochs: 2}\n"
EVIL = "_target_: hydra_plugins.evil.Launcher\n"


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the conf/ of an empty current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    return tmp_path / "conf"


@pytest.mark.parametrize("mine", ["mlp", "template"])
def test_an_experiment_is_a_template(mine: str, conf: Path) -> None:
    """It replaces groups and sets keys over those of the config,
    whether or not the config lists `experiment: null`.
    """
    (conf / "template.yaml").write_text("defaults: [mlp, _self_, {experiment: null}]\n")
    (conf / "experiment" / "good.yaml").write_text(GOOD)
    jobs: list[ComposedJob] = []
    assert main("fit", [f"conf={mine}", "experiment=good", "seed=3"], jobs.append) == 0
    config = jobs[0].config
    assert (config["optimizer"]["_target_"], config["trainer"]["max_epochs"]) == (
        "torch.optim.AdamW",
        2,
    )
    assert "- experiment=good\n" in jobs[0].files[".hydra/overrides.yaml"]


MISTAKES = {
    HEAD + "defaults: [{/optimizer: adamw}]": [
        "optimizer is chosen by two defaults lists",
        "`- override /optimizer: adamw`. On the command line it is optimizer=adamw, without the +.",
    ],
    HEAD + "defaults: [{optimizer: adamw}]": [
        "begins with a slash",
        "`- override /optimizer: adamw`",
    ],
    HEAD + "defaults: [{override optimizer: adamw}]": [
        "begins with a slash",
        "`- override /optimizer: NAME`",
    ],
    HEAD + "defaults: [{override /optimzer: adamw}]": [
        "experiment/one replaces a choice of optimzer",
        "`- /optimzer: NAME`",
    ],
    HEAD + "defaults: [{override /optimizer: adamw}, {/callbacks@x: ema}]": [
        "Put all lines with `override` last"
    ],
    "trainer: {max_epochs: 1}": ["its first line must be: # @package _global_"],
    HEAD + "defaults: [{override /hydra/launcher: own}]": [
        "A config file sets hydra.launcher",
        "hydra/launcher=NAME",
    ],
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_an_experiment_is_explained(
    text: str, conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra's rule of `override` is said in full, with the line to write."""
    (conf / "hydra" / "launcher").mkdir(parents=True)
    (conf / "hydra" / "launcher" / "own.yaml").write_text(EVIL)
    (conf / "experiment" / "one.yaml").write_text(text + "\n")
    assert main("fit", ["conf=mlp", "experiment=one"]) == 2
    said = capsys.readouterr().err
    assert all(words in said for words in MISTAKES[text]), said


def test_an_unknown_experiment_is_named(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the ones that there are, or where to write the first."""
    (conf / "experiment" / "good.yaml").write_text(GOOD)
    assert main("fit", ["conf=mlp", "experiment=goof"]) == 2
    assert "Did you mean 'good'?" in capsys.readouterr().err
    (conf / "experiment" / "good.yaml").unlink()
    (conf / "experiment").rmdir()
    assert main("fit", ["conf=mlp", "experiment=good"]) == 2
    assert "Write conf/experiment/good.yaml" in capsys.readouterr().err


def test_a_second_choice_in_a_config_is_explained(
    conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also beside a base config, not only in an experiment."""
    (conf / "mine.yaml").write_text("defaults: [mlp, {optimizer: adamw}, _self_]\n")
    assert main("fit", ["conf=mine"]) == 2
    assert "`- override /optimizer: adamw`" in capsys.readouterr().err


# Hydra's, while the file is looked at
@pytest.mark.filterwarnings(r"ignore:\s*'hydra.*is validated against ConfigStore")
@pytest.mark.parametrize("group", ["launcher", "sweeper"])
def test_a_file_cannot_stand_in_for_hydras_own(
    group: str, conf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """conf/hydra/launcher/basic.yaml would be found before Hydra's."""
    (conf / "hydra" / group).mkdir(parents=True)
    (conf / "hydra" / group / "basic.yaml").write_text(EVIL)
    assert main("fit", ["-m", "conf=mlp", "seed=1,2"]) == 2
    assert f"would replace Hydra's own hydra/{group}=basic" in capsys.readouterr().err


def test_a_group_of_ones_own_is_used_where_it_is_typed(conf: Path) -> None:
    """conf/hydra/sweeper/mine.yaml gives the values of a sweep."""
    (conf / "hydra" / "sweeper").mkdir(parents=True)
    text = "defaults: [basic]\nparams: {task.model.width: '32,48', optimizer.lr: '0.5'}\n"
    (conf / "hydra" / "sweeper" / "mine.yaml").write_text(text)
    jobs: list[ComposedJob] = []
    assert (
        main("fit", ["-m", "conf=mlp", "hydra/sweeper=mine", "optimizer.lr=0.25"], jobs.append) == 0
    )
    assert [job.config["task"]["model"]["width"] for job in jobs] == [32, 48]
    assert {job.config["optimizer"]["lr"] for job in jobs} == {0.25}
