"""Settings of the Trainer that a config gives elsewhere too:
`data.on_bad_sample` and its limit, `engine.device`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainkit.config.compose import run
from trainkit.config.instantiate import build
from trainkit.config.schema import with_accelerator


def test_any_data_takes_the_settings(tmp_path: Path) -> None:
    """They are not passed to the DataModule: its constructor has no such arguments."""
    jobs: list[Any] = []
    typed = [
        "conf=mlp",
        f"run_dir={tmp_path}",
        "data.on_bad_sample=skip",
        "data.on_bad_sample_limit=7",
    ]
    run("fit", typed, True, jobs.append)
    assert build(jobs[0].config, []).trainer.options.samples.limit == 7


@pytest.mark.parametrize(
    ("typed", "device"),
    [
        ("trainer.accelerator=cpu", "cpu"),
        ("trainer.accelerator=gpu", "cuda"),
        ("trainer.accelerator=auto", "auto"),
    ],
)
def test_a_config_takes_lightnings_accelerator(typed: str, device: str, tmp_path: Path) -> None:
    """As a script's Trainer does: it is the engine's device."""
    jobs: list[Any] = []
    run("fit", ["conf=mlp", f"run_dir={tmp_path}", typed], True, jobs.append)
    config = with_accelerator(jobs[0].config)
    assert config["engine"]["device"] == device and "accelerator" not in config["trainer"]
    if device != "cuda":
        build(jobs[0].config, [])
