"""`vars` that are typed: an interpolation reads them, or they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainkit.cli.run import main
from trainkit.config.compose import ComposedJob

OWN = """
defaults: [mlp, _self_]
vars: {width: 8, rates: {slow: 0.01}, whole: 3}
task: {model: {width: "${vars.width}"}}
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
        ("vars.rate=0.5", lambda config: config["optimizer"]["lr"] == 0.5),
        ("vars.rates.slow=0.5", lambda config: config["optimizer"]["momentum"] == 0.5),
        ("vars={width: 4}", lambda config: config["task"]["model"]["width"] == 4),
        ("+vars.note=mine", lambda config: config["vars"]["note"] == "mine"),
    ],
)
def test_a_typed_one_that_is_read_holds(override: str, read: Any) -> None:
    """Also one that only a default of an interpolation names, and one that a + records."""
    assert read(config_of(override))


@pytest.mark.parametrize("override", ["vars.widht=16", "vars.whole=4", "vars.widht.x=1"])
@pytest.mark.parametrize("flags", [[], ["-m"]])
def test_one_that_nothing_reads_is_refused(
    override: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped one would train with the old value."""
    assert main("fit", ["conf=own", *flags, override]) == 2
    text = capsys.readouterr().err
    key, _, value = override.partition("=")
    assert f"{key} is {value}, and nothing in the config reads it" in text
    assert ("Did you mean 'width'?" in text) == ("widht" in override)
