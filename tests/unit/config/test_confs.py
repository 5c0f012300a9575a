"""Every shipped config composes, passes the schema, and builds on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trainkit.config.compose import ComposedJob, run
from trainkit.config.instantiate import build
from trainkit.config.resources import shipped_root
from trainkit.errors import ConfigError

CONF = shipped_root() / "conf"
TOPS = sorted(p.stem for p in CONF.glob("*.yaml") if not p.stem.startswith("_"))
OPTIONS = sorted(f"{p.parent.name}={p.stem}" for p in CONF.glob("*/*.yaml"))
# Of the other groups test_swaps.py walks each choice, in each conf.
ALONE = [option for option in OPTIONS if option.startswith(("callbacks=", "logger=", "trainer="))]
NEEDED = {"resnet50_a3": ["data.root=."], "vit_b16": ["data.root=."]}


def jobs_of(*arguments: str) -> list[ComposedJob]:
    """Return the jobs that a command line leads to."""
    found: list[ComposedJob] = []
    run("fit", arguments, True, found.append)
    return found


def test_all_configs_are_seen() -> None:
    """The tests below walk every yaml there is."""
    names = (
        "bert dpo gpt gpt_124m hf_causal_lm hf_classifier llama mlp recommender resnet18 resnet50 resnet50_a3"
        " sft vit_b16"
    )
    assert names.split() == TOPS
    assert len(OPTIONS) + len(TOPS) + 1 == len(list(CONF.rglob("*.yaml")))


@pytest.mark.parametrize("conf", TOPS)
def test_a_top_level_config_builds(conf: str) -> None:
    """Each conf=NAME leads to a trainer, a task and data."""
    (job,) = jobs_of(f"conf={conf}", *NEEDED.get(conf, []))
    built = build(job.config, [])
    assert built.datamodule is not None
    assert built.trainer.options.limits.max_epochs == job.config["trainer"]["max_epochs"]


def test_a_checkpoints_path_needs_no_quotes() -> None:
    """Hydra alone does not read a value with "="."""
    (job,) = jobs_of("conf=mlp", "run_dir=runs/a/checkpoints/epoch=1-step=90")
    assert job.config["run_dir"] == "runs/a/checkpoints/epoch=1-step=90"


@pytest.mark.parametrize("option", ALONE)
def test_an_option_of_a_group_composes(option: str) -> None:
    """Each callback and logger passes the schema without the others."""
    (job,) = jobs_of("conf=mlp", option)
    assert option.split("=")[0] in job.config


@pytest.mark.parametrize("conf", ["mlp", "resnet18", "resnet50"])
def test_another_optimizer_brings_its_own_rate(conf: str) -> None:
    """A conf's rate is for its own SGD: AdamW with it would diverge;
    a rate on the command line is for the chosen optimizer.
    """
    rates = {"sgd": 0.05 if conf == "mlp" else 0.24, "adamw": 1e-3, "lamb": 2e-3, "lars": 2.0}
    for optimizer, rate in rates.items():
        assert (
            jobs_of(f"conf={conf}", f"optimizer={optimizer}")[0].config["optimizer"]["lr"] == rate
        )
    assert (
        jobs_of(f"conf={conf}", "optimizer=adamw", "optimizer.lr=0.5")[0].config["optimizer"]["lr"]
        == 0.5
    )


def test_the_users_own_conf_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conf/ in the current folder shadows the shipped one, and still finds the shipped groups."""
    (tmp_path / "conf").mkdir()
    own = {
        "defaults": [
            "_base",
            {"task": "mlp"},
            {"data": "digits"},
            {"optimizer": "adamw"},
            {"lr": "step"},
            "_self_",
        ]
    }
    (tmp_path / "conf" / "mlp.yaml").write_text(
        yaml.safe_dump(own | {"trainer": {"max_epochs": 7}})
    )
    monkeypatch.chdir(tmp_path)
    (job,) = jobs_of("conf=mlp")
    assert job.config["trainer"]["max_epochs"] == 7
    assert job.config["optimizer"]["_target_"] == "torch.optim.AdamW"


def test_multirun_gives_each_job_its_values_and_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-m leads to a job for each combination, each in a folder of its own;
    Hydra leaves nothing in the current folder.
    """
    monkeypatch.chdir(tmp_path)
    jobs = jobs_of("-m", "conf=mlp", "optimizer.lr=0.05,0.1", "seed=1,2")
    assert [(j.config["optimizer"]["lr"], j.config["seed"]) for j in jobs] == [
        (0.05, 1),
        (0.05, 2),
        (0.1, 1),
        (0.1, 2),
    ]
    assert [Path(j.config["run_dir"]).name for j in jobs] == ["0", "1", "2", "3"]
    assert list(tmp_path.iterdir()) == []


def test_a_group_that_nothing_uses_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer group beside a task that takes no optimizer
    would have no effect, and is refused.
    """
    (tmp_path / "conf").mkdir()
    (tmp_path / "plain_task.py").write_text(
        "import trainkit\nclass Plain(trainkit.Task):\n    pass\n"
    )
    own = {
        "defaults": ["_base", {"optimizer": "sgd"}, "_self_"],
        "task": {"_target_": "plain_task.Plain"},
    }
    (tmp_path / "conf" / "own.yaml").write_text(
        yaml.safe_dump(own | {"trainer": {"max_epochs": 1}})
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="optimizer is set, but nothing uses it"):
        jobs_of("conf=own")
    (job,) = jobs_of("conf=own", "~optimizer")
    assert job.config["task"]["_target_"] == "plain_task.Plain"


def test_cfg_says_what_the_command_would_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped key is printed as it is composed, with the sentence of a fit beside it."""
    assert jobs_of("conf=mlp", "--cfg", "job", "trainer.max_epoch=3", "--package", "trainer") == []
    printed = capsys.readouterr()
    assert "max_epoch: 3" in printed.out
    assert "would be refused: trainer.max_epoch is not a setting" in printed.err
    assert "Did you mean 'max_epochs'?" in printed.err
    assert jobs_of("conf=mlp", "--cfg=job", "trainer.max_epoch=3") == []
    assert "would be refused" in capsys.readouterr().err
    assert jobs_of("conf=mlp", "--cfg", "job", "trainer.max_epochs=3") == []
    assert capsys.readouterr().err == ""


def test_cfg_prints_the_config_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """--cfg job prints the composed config, as Hydra does."""
    assert jobs_of("conf=resnet50", "--cfg", "job", "trainer.max_epochs=3") == []
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["max_epochs"] == 3
    assert printed["data"]["_target_"] == "recipes.digits.Digits"


def test_a_key_of_a_constructor_needs_no_plus() -> None:
    """An argument that the yaml does not list can be set as if it did."""
    (job,) = jobs_of(
        "conf=mlp",
        "trainer.deterministic=true",
        "optimizer.dampening=0.1",
        "optimizer.nesterov=false",
    )
    assert job.config["trainer"]["deterministic"] is True
    assert job.config["optimizer"]["dampening"] == 0.1


def test_imagefolder_brings_the_schedule_of_imagenet() -> None:
    """data=imagefolder sets epochs, warm-up and rate, and the command line still wins."""
    (job,) = jobs_of("conf=resnet50", "data=imagefolder", "data.root=.", "trainer.max_epochs=3")
    assert (job.config["trainer"]["max_epochs"], job.config["trainer"]["lr_warmup_epochs"]) == (
        3,
        5,
    )
    assert job.config["optimizer"]["lr"] == 0.1
