"""`data.on_bad_sample` and its limit are settings of any data, and the Trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainkit.config.compose import run
from trainkit.config.instantiate import build


def test_any_data_takes_the_settings(tmp_path: Path) -> None:
    """They are not passed to the DataModule: its constructor has no such arguments."""
    jobs: list[Any] = []
    typed = ["conf=mlp", f"run_dir={tmp_path}", "data.on_bad_sample=skip", "data.on_bad_sample_limit=7"]
    run("fit", typed, True, jobs.append)
    assert build(jobs[0].config, []).trainer.options.samples.limit == 7
