"""`vars` that are typed: an interpolation reads them, or they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainkit.cli.run import main
from trainkit.config.compose import ComposedJob

OWN = """
defaults: [mlp, _self_]
vars: {width: 8, rates: {slow: 0.01}, whole: 3, which: small, sizes: {small: 16}, nodes: 1}
task: {model: {width: "${vars.width}"}}
data: {batch_size: "${vars.sizes.${vars.which}}"}
optimizer: {lr: "${oc.select:vars.rate,0.2}", momentum: "${vars.rates.slow}"}
"""


@pytest.fixture(autouse=True)
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the conf/ of a current folder, with own.yaml."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "own.yaml").write_text(OWN)
    monkeypatch.chdir(tmp_path)


def config_of(*overrides: str) -> dict[str, Any]:
    """Return the config of the one job."""
    jobs: list[ComposedJob] = []
    assert main("fit", ["conf=own", *overrides], jobs.append) == 0
    return jobs[0].config


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("vars.width=16", lambda config: config["task"]["model"]["width"] == 16),
        ("+vars.rate=0.5", lambda config: config["optimizer"]["lr"] == 0.5),
        ("vars.whole=4", lambda config: config["vars"]["whole"] == 4),
        ("vars.sizes.small=32", lambda config: config["data"]["batch_size"] == 32),
        ("vars.rates.slow=0.5", lambda config: config["optimizer"]["momentum"] == 0.5),
        ("vars={width: 4}", lambda config: config["task"]["model"]["width"] == 4),
        ("+vars.note=mine", lambda config: config["vars"]["note"] == "mine"),
    ],
)
def test_a_typed_one_that_is_read_holds(override: str, read: Any) -> None:
    """Also one that no interpolation names, and, with a +, one that no file has."""
    assert read(config_of(override))


@pytest.mark.parametrize("override", ["vars.widht=16", "vars.rate=0.5", "vars.rates.slwo=1"])
@pytest.mark.parametrize("flags", [[], ["-m"], ["--cfg", "job"]])
def test_one_that_no_file_has_is_refused(
    override: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped one would train with the old value; the remedy works."""
    assert main("fit", ["conf=own", *flags, override]) == 2
    text = capsys.readouterr().err
    key, _, value = override.partition("=")
    assert f"{key} is given, and no file of this config gives it a value." in text
    assert f"+{key}=..." in text
    assert ("Did you mean 'width'?" in text) == ("widht" in override)
    assert ("Did you mean 'slow'?" in text) == ("slwo" in override)
    config_of(f"+{override}")


def test_what_only_one_job_of_a_sweep_or_the_launcher_reads_holds(tmp_path: Path) -> None:
    """The launcher is in no file of the run, and another job has other choices."""
    (tmp_path / "conf/far.yaml").write_text(
        "defaults: [own, {override launcher: slurm}, _self_]\nlauncher: {nodes: '${vars.nodes}'}\n"
    )
    jobs: list[ComposedJob] = []
    assert main("fit", ["conf=far", "vars.nodes=3", "run_dir=r"], jobs.append) == 0
    assert jobs[0].config["launcher"]["nodes"] == 3
    assert (
        main("fit", ["-m", "conf=own", "vars.which=small,large", "vars.sizes.large=4"], jobs.append)
        == 2
    )
    more = ["vars.which=small,large", "+vars.sizes.large=4"]
    assert main("fit", ["-m", "conf=own", *more], jobs.append) == 0
    assert [job.config["data"]["batch_size"] for job in jobs[1:]] == [16, 4]


def test_one_that_is_read_and_not_there_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both errors say how it is given."""
    text = "defaults: [mlp, _self_]\ntask: {model: {width: '${vars.width}'}}\n"
    (tmp_path / "conf/asks.yaml").write_text(text)
    for typed in ([], ["vars.width=8"]):
        assert main("fit", ["conf=asks", *typed]) == 2
        assert "+vars.width=..." in capsys.readouterr().err
    jobs: list[ComposedJob] = []
    assert main("fit", ["conf=asks", "+vars.width=8"], jobs.append) == 0
    assert jobs[0].config["task"]["model"]["width"] == 8
