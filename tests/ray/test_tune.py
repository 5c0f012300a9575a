"""Searches with Ray Tune: by command with ASHA, PBT, a failing trial,
and `trial` in a Tuner of one's own.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from tests.helpers.launching import Command
from trainkit.errors import ConfigError
from trainkit.extensions.ray.connection import connect_ray
from trainkit.extensions.ray.tuning.search import start_ray
from trainkit.extensions.ray.tuning.words import SearchSettings

SCRIPT = """
from ray import tune
from trainkit.tuning import trial

if __name__ == "__main__":
    tuner = tune.Tuner(
        trial(["conf=mlp", "trainer.max_epochs=1", "logger=none"]),
        param_space={"optimizer.lr": tune.grid_search([0.05, -1.0])},
        run_config=tune.RunConfig(storage_path="STORAGE", verbose=0),
    )
    for found in tuner.fit():
        print("TRIAL", found.config["optimizer.lr"], found.metrics.get("val/acc"), found.checkpoint, found.error)
"""


def runs(command: Command) -> list[dict[str, Any]]:
    """Return the facts of the trials in the folder `search`, by number."""
    listed = json.loads(command("python -m trainkit runs search --json").out)["runs"]
    return sorted((run for run in listed if run["run"].isdigit()), key=lambda run: int(run["run"]))


def test_asha_ends_bad_trials_early(cluster: str, command: Command) -> None:
    """Of four rates the two bad ones end after one epoch;
    the table has all, and the best one's command trains as it did.
    """
    line = (
        "python -m trainkit tune conf=mlp 'search.optimizer.lr=grid(0.1,0.05,0.0002,0.0001)'"
        " search.num_samples=1 "
    )
    done = command(
        line
        + "search.scheduler=asha search.reduction_factor=2 search.max_concurrent=2 run_dir=search"
    )
    assert done.code == 0, done.text[-3000:]
    trials = runs(command)
    assert [run["state"] for run in trials] == ["done"] * 4
    assert trials[3]["epochs"] == 1 and max(run["epochs"] for run in trials) == 5
    best = re.search(r"^best +run \d: val/acc = ([\d.]+) \(", done.out, re.MULTILINE)
    again = re.search(r"^repeat +(python -m trainkit fit .*)$", done.out, re.MULTILINE)
    assert best is not None and again is not None and float(best[1]) > 0.9
    fit = command(again[1] + " run_dir=again trainer.enable_progress_bar=false")
    assert fit.code == 0, fit.text
    last = [line for line in fit.out.splitlines() if "val/acc" in line][-1:]
    assert not last or best[1][:5] in last[0]


def test_pbt_trains_on_with_a_better_trials_weights(
    cluster: str, command: Command, tmp_path: Path
) -> None:
    """The trial with a useless rate resumes from the other's checkpoint
    with a rate near the other's, and ends as well.
    """
    line = (
        "python -m trainkit tune conf=mlp 'search.optimizer.lr=choice(0.0001,0.1)'"
        " search.num_samples=2 search.seed=3 "
    )
    done = command(line + "search.scheduler=pbt trainer.max_epochs=3 run_dir=search")
    assert done.code == 0, done.text[-3000:]
    texts = [path.read_text() for path in tmp_path.glob("search/*/output.txt")]
    assert len(texts) == 2 and all("resumed" in text for text in texts)
    assert any("learning rate  0.0001 x" in text for text in texts)
    # after two of three epochs: none with values that train no step
    assert [text.count("resumed") for text in texts] == [2, 2]
    assert all(run["metrics"]["val/acc"]["last"] > 0.9 for run in runs(command)), done.out


def test_a_failed_trial_ends_alone(cluster: str, command: Command) -> None:
    """Its error is in the table, the others continue, and the exit code says that one failed."""
    line = (
        "python -m trainkit tune conf=mlp 'search.optimizer.lr=grid(0.05,1e9)' search.num_samples=1"
        " search.scheduler=none "
    )
    done = command(line + "trainer.max_epochs=1 trainer.stop_on_nonfinite=true run_dir=search")
    assert done.code == 1
    good, bad = runs(command)
    assert (good["state"], bad["state"]) == ("done", "failed")
    assert bad["error"].strip() and bad["error"].splitlines()[0][:20] in done.out.replace("\n", " ")
    assert "1 of 2 trials failed; the first (trial 1)" in done.err


def test_mistakes_end_a_search_before_it_starts(command: Command) -> None:
    """An unknown key, a metric without direction and no search at
    all are refused without Ray's start.
    """
    start = "python -m trainkit tune conf=mlp "
    unknown = command(start + "'search.optimizer.lrr=uniform(0,1)'")
    assert unknown.code == 2 and "lrr" in unknown.err
    aimless = command(start + "'search.optimizer.lr=uniform(0,1)' search.metric=train/loss")
    assert aimless.code == 2 and "search.mode is missing" in aimless.err
    assert command(start).code == 2


def test_a_metric_that_is_never_logged_fails_with_the_names_that_are(
    cluster: str, command: Command
) -> None:
    """Each trial ends at its first report, which names what it logged."""
    line = (
        "python -m trainkit tune conf=mlp 'search.optimizer.lr=uniform(0.01,0.1)'"
        " search.num_samples=1 search.mode=max "
    )
    done = command(line + "search.metric=val/acccc run_dir=search")
    assert done.code == 1
    assert "search.metric is 'val/acccc', which was not logged for an epoch; there are" in done.err


def test_trial_is_a_trainable(cluster: str, command: Command, tmp_path: Path) -> None:
    """In a Tuner of one's own keys of param_space are overrides;
    a trial that fails has trainkit's words as its error.
    """
    (tmp_path / "mine.py").write_text(SCRIPT.replace("STORAGE", str(tmp_path / "tuned")))
    done = command("python mine.py")
    assert done.code == 0, done.text[-3000:]
    good, bad = sorted(
        (line for line in done.out.splitlines() if line.startswith("TRIAL")),
        key=lambda line: " -1.0 " in line,
    )
    assert "Checkpoint(" in good and "None" in good
    assert "TRIAL -1.0 None None" in bad
    assert "Invalid learning rate: -1.0" in done.text


RANKS = """
from ray import tune
from trainkit.tuning import trial

if __name__ == "__main__":
    tuner = tune.Tuner(
        trial(["conf=mlp", "trainer.max_epochs=2", "logger=none"], num_workers=2),
        param_space={"optimizer.lr": tune.grid_search([0.05, -1.0])},
        run_config=tune.RunConfig(storage_path="STORAGE", verbose=0),
        tune_config=tune.TuneConfig(max_concurrent_trials=1),
    )
    for found in tuner.fit():
        print("TRIAL", found.config["optimizer.lr"], found.metrics.get("val/acc"), found.checkpoint, found.error)
"""


def test_a_trial_has_several_ranks(cluster: str, command: Command, tmp_path: Path) -> None:
    """In the bundles of its own placement group, under the elastic driver;
    its values are those of horovodrun.
    """
    (tmp_path / "mine.py").write_text(RANKS.replace("STORAGE", str(tmp_path / "tuned")))
    done = command("python mine.py")
    assert done.code == 0, done.text[-3000:]
    good, bad = sorted(
        (line for line in done.out.splitlines() if line.startswith("TRIAL")),
        key=lambda line: " -1.0 " in line,
    )
    assert "Checkpoint(" in good and "TRIAL -1.0 None None" in bad
    assert "Invalid learning rate: -1.0" in done.text
    output = next(
        path
        for path in (tmp_path / "tuned").rglob("output.txt")
        if "[0]<stdout>" in path.read_text()
    )
    assert "x 2 ranks" in output.read_text()
    fit = "python -m trainkit fit conf=mlp optimizer.lr=0.05 trainer.max_epochs=2 run_dir=plain"
    assert command(f"horovodrun --gloo -np 2 {fit}").code == 0
    rows = list(csv.DictReader((tmp_path / "plain" / "metrics.csv").open()))
    assert float(good.split()[2]) == pytest.approx(
        float(next(row["val/acc"] for row in reversed(rows) if row["val/acc"]))
    )


def test_a_search_on_a_cluster_that_others_hold_says_what_it_waits_for(cluster: Any) -> None:
    """One line, with what a trial takes and what is free; none if there is room."""
    said: list[str] = []
    settings = SearchSettings(num_workers=2, resources={"CPU": 2})
    connect_ray("The test")
    held = placement_group([{"CPU": 1}])
    try:
        assert held.wait(60)
        start_ray(settings, said.append)
        (line,) = said
        assert line.startswith(
            "waiting for 2 x {CPU: 2} of a trial (search.resources); free now: {"
        )
        remove_placement_group(held)
        start_ray(settings, said.append)
        assert said == [line]
        with pytest.raises(ConfigError, match=r"search\.resources .* no node .* add nodes"):
            start_ray(SearchSettings(resources={"GPU": 1}), said.append)
    finally:
        ray.shutdown()
