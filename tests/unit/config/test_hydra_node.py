"""A foreign config file cannot make Hydra itself run code."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from trainkit.cli.run import main
from trainkit.config.hydra_node import plain_help

HEAD = "defaults: [mlp, _self_]\n"
BAD = {
    "a callback": "hydra: {callbacks: {x: {_target_: torch.load, f: payload.pth}}}",
    "a callback by interpolation": (
        "vars: {x: {_target_: torch.load, f: y}}\nhydra: {callbacks: {x: '${vars.x}'}}"
    ),
    "a handler of the log": (
        "hydra: {hydra_logging: {version: 1, handlers: {x: {(): os.getcwd}}, root: {handlers:"
        " [x]}}}"
    ),
    "a log of the job": (
        "hydra: {job_logging: {version: 1, handlers: {x: {(): os.getcwd}}, root: {handlers: [x]}}}"
    ),
    "a launcher": "hydra: {launcher: {_target_: os.system}}",
    "a sweeper": "hydra: {sweeper: {_target_: os.system}}",
    "an environment": "hydra: {job: {env_set: {LD_PRELOAD: x}}}",
    "another folder": "hydra: {job: {chdir: true}}",
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("flags", [[], ["-m"]])
def test_a_config_file_may_not_set_what_hydra_runs(
    name: str,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Callbacks, launcher, sweeper,
    logging and environment of Hydra can only come from the command line.
    """
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "evil.yaml").write_text(HEAD + BAD[name] + "\n")
    monkeypatch.chdir(tmp_path)
    assert main("fit", [*flags, "conf=evil"]) == 2
    assert "A config file sets hydra." in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["conf"]


@pytest.mark.parametrize(
    "text",
    ["run: {dir: x}", "sweep: {dir: x}", "output_subdir: x", "mode: MULTIRUN", "verbose: true"],
)
@pytest.mark.parametrize("flags", [[], ["-m"], ["--cfg", "job"]])
def test_a_setting_of_hydra_without_effect_is_refused(
    text: str,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A config's file names neither folders nor the mode: run_dir and -m do."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "own.yaml").write_text(f"{HEAD}hydra: {{{text}}}\n")
    monkeypatch.chdir(tmp_path)
    assert main("fit", ["conf=own", *flags]) == 2
    key = text.partition(":")[0]
    assert f"own.yaml sets hydra.{key}, which has no effect" in capsys.readouterr().err


def test_the_name_of_a_job_may_be_made_of_its_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra's hydra.job in a file, for a run's folder."""
    (tmp_path / "conf").mkdir()
    job = "{config: {override_dirname: {exclude_keys: [seed]}}}"
    (tmp_path / "conf" / "own.yaml").write_text(
        f"{HEAD}hydra: {{job: {job}}}\nrun_dir: runs/${{hydra:job.override_dirname}}\n"
    )
    monkeypatch.chdir(tmp_path)
    jobs: list[Any] = []
    assert main("fit", ["conf=own", "optimizer.lr=0.3", "seed=4"], jobs.append) == 0
    assert "optimizer.lr=0.3" in jobs[0].config["run_dir"]
    assert "seed" not in jobs[0].config["run_dir"]


def test_a_choice_of_a_sweep_is_looked_at_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A group's file that sets Hydra's logging is found among the values of a sweep,
    before the first job runs.
    """
    (tmp_path / "conf" / "data").mkdir(parents=True)
    text = (
        "# @package _global_\ndefaults: [digits]\nhydra: {job_logging: {handlers: {x: {():"
        " os.getcwd}}}}\n"
    )
    (tmp_path / "conf" / "data" / "evil.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main("fit", ["-m", "conf=mlp", "data=digits,evil"]) == 2
    assert "A config file sets hydra.job_logging" in capsys.readouterr().err


def test_a_shipped_config_is_found_beside_the_users_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conf/ of the user's hides no shipped config, and its groups come first."""
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "digits.yaml").write_text(
        "{_target_: recipes.digits.Digits, batch_size: 7, num_classes: 10}"
    )
    monkeypatch.chdir(tmp_path)
    from trainkit.config.compose import ComposedJob, run

    jobs: list[ComposedJob] = []
    run("fit", ["conf=resnet18"], True, jobs.append)
    assert jobs[0].config["data"]["batch_size"] == 7


def test_trust_can_only_be_given_at_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A config file that opens the allow-list for itself is refused."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "own.yaml").write_text(HEAD + "trust: [fractions]\n")
    monkeypatch.chdir(tmp_path)
    assert main("fit", ["conf=own"]) == 2
    assert "it may only be given on the command line: trust=[...]" in capsys.readouterr().err


def test_an_options_help_is_text_when_it_is_defined() -> None:
    """Hydra's for completion is an object that prints as text, which Python 3.14 refuses."""

    class Late:
        def __repr__(self) -> str:
            return "what it does"

    add = argparse.ArgumentParser.add_argument
    with plain_help():
        option = argparse.ArgumentParser().add_argument("--first", help=Late())  # type: ignore[arg-type]
    assert option.help == "what it does"
    assert argparse.ArgumentParser.add_argument is add
