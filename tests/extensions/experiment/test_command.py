"""What `experiment` is asked for, the sides that it refuses, and a folder that seeds are read from."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import ConfigError
from trainkit.extensions.experiment import sides
from trainkit.extensions.experiment.command import read_request, seconds
from trainkit.extensions.experiment.report import ComparedConfigs, pairing, show, verdict_line
from trainkit.extensions.experiment.seeds import SeedPair, Seeds
from trainkit.extensions.experiment.sides import Side, check_contract, look_at_side, metric_of
from trainkit.extensions.script.changes import Changes


def record(value: float, order: str = "o", weight: str = "w") -> dict[str, Any]:
    """Return what a run leaves."""
    return {
        "weights": {"layer": weight},
        "order": [[order, "same"]],
        "samples": [["s", "s"]],
        "samples_seen": 64,
        "seconds": 3.0,
        "fit_s": 1.0,
        "values": {"val/loss": value},
        "not_finite": [],
    }


def side(name: str, monitored: tuple[str, str] | None = None, **contract: Any) -> Side:
    """Return a side that was looked at."""
    subject: Any = None
    whole = {"global batch": 64, "data set": "Digits", **contract}
    return Side(name, f"x={name}", subject, whole, monitored, f"digest of {name}")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["a.yaml"], "compares two sides, and 1 are given"),
        (["a.yaml", "a.yaml"], "Both sides are 'a.yaml': there is nothing to compare."),
        (["a.yaml", "b.yaml", "c.yaml"], "'c.yaml' is a third side"),
        (["a.yaml", "b.yaml", "-m"], "leave -m out"),
        (["a.yaml", "b.yaml", "budget=soon"], "budget is 'soon'; it must be a time above 0"),
        (["a.yaml", "b.yaml", "budget=0s"], "budget is '0s'"),
        (["a.yaml", "b.yaml", "seeds=0"], "seeds is '0'; it must be a whole number, 1 or more."),
        (["a.yaml", "b.yaml", "mode=best"], "mode is 'best'; it must be min or max."),
    ],
)
def test_what_cannot_be_asked_for(typed: list[str], message: str) -> None:
    """Each mistake has its sentence, before anything is composed."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_request(typed)


def test_sides_and_what_they_share() -> None:
    """conf= and what stands behind the sides holds for both; the folder is named after them."""
    asked = read_request(
        ["optimizer=adamw", "optimizer=sgd", "conf=mlp", "trainer.max_steps=5", "budget=2m"]
    )
    assert asked.sides == ("optimizer=adamw", "optimizer=sgd")
    assert asked.shared == ("conf=mlp", "trainer.max_steps=5")
    assert (asked.seeds, asked.budget_s) == (3, 120.0)
    assert asked.folder == Path("runs/experiment/optimizer=adamw-optimizer=sgd")
    assert [seconds(text) for text in ("90", "1.5h")] == [90.0, 5400.0]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("c.yaml", "There is no config c.yaml in conf/."),
        ("mlpp", "'mlpp' is not a side"),
        ("mine.py --x 1", "There is no script mine.py"),
    ],
)
def test_what_is_not_a_side(
    typed: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what a side may be."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        look_at_side("a", typed, [])


def test_another_problem_is_refused_by_name() -> None:
    """The key and both values are named; the metric is a part of the problem."""
    check_contract(side("a"), side("b"))
    with pytest.raises(ConfigError, match=r"global batch is 64 of a \(x=a\) and 32 of b \(x=b\)"):
        check_contract(side("a"), side("b", **{"global batch": 32}))
    with pytest.raises(ConfigError, match="the metric is val/loss min of a .* and val/acc max"):
        metric_of(side("a", ("val/loss", "min")), side("b", ("val/acc", "max")), None, None)


def test_the_metric_is_what_a_callback_monitors() -> None:
    """Or the one that is given; without either, and without a mode, what to type is said."""
    loss, other = side("a", ("val/loss", "min")), side("b")
    assert metric_of(loss, other, None, None) == ("val/loss", "min")
    assert metric_of(loss, other, "val/loss", None) == ("val/loss", "min")
    assert metric_of(loss, other, "val/acc", "max") == ("val/acc", "max")
    with pytest.raises(ConfigError, match="metric is missing"):
        metric_of(other, other, None, None)
    with pytest.raises(ConfigError, match="mode is missing: is a smaller val/acc better"):
        metric_of(loss, other, "val/acc", None)


def test_other_samples_are_not_paired() -> None:
    """If an order differs, the seed, the rank and the step are named."""
    assert "the same samples in the same order, bit for bit; the same first weights" in pairing(
        [SeedPair(0, record(1.0), record(2.0))]
    )
    unlike = pairing([SeedPair(0, record(1.0), record(2.0, weight="other"))])
    assert "0 of 1 and 1 first weights equal" in unlike
    with pytest.raises(ConfigError, match="with seed 4 rank 0 got other samples from step 1 on"):
        pairing([SeedPair(4, record(1.0), record(2.0, order="another"))])


def test_a_value_that_is_not_there_is_refused() -> None:
    """With what is logged; one that is not finite has no difference."""
    with pytest.raises(ConfigError, match="side a does not log for whole .* It logs: val/loss"):
        SeedPair(0, record(1.0), record(2.0)).values("val/acc")
    bad = {**record(1.0), "not_finite": ["val/loss"]}
    with pytest.raises(ConfigError, match="val/loss of side b is not finite with seed 1"):
        SeedPair(1, record(1.0), bad).values("val/loss")


def seeds(folder: Path, budget_s: float | None = 0.0, other: str = "b") -> Seeds:
    """Return the runs of an experiment; the budget allows none."""
    return Seeds(side("a"), side(other), folder, 1, budget_s)


def test_seeds_that_have_run_are_not_run_again(tmp_path: Path) -> None:
    """They are read; the others are left out by a budget of nothing, and named."""
    runs = seeds(tmp_path)
    runs.claim()
    for name, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / "seed-1").mkdir(exist_ok=True)
        (tmp_path / "seed-1" / f"{name}.seen.json").write_text(json.dumps(record(value)))
    assert [pair.seed for pair in runs.run(3)] == [1]
    assert (runs.left_out, runs.started) == ([0, 2], [])


def test_a_folder_of_another_experiment_is_refused(tmp_path: Path) -> None:
    """And one whose side does something else now, though it is typed the same."""
    seeds(tmp_path).claim()
    seeds(tmp_path).claim()
    with pytest.raises(ConfigError, match="b was 'x=b' and is 'x=c'"):
        seeds(tmp_path, other="c").claim()


def test_seeds_of_older_code_are_not_mixed_with_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's modules that a side imports are compared, too; others of Python are not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    task = tmp_path / "own_task_of_a_side.py"
    task.write_text("from tests.helpers.toy import Line as Mine\n")
    importlib.import_module(task.stem)
    files = sides._own_files()
    assert list(files) == [task.name]
    now = replace(side("a"), files=files)
    Seeds(now, side("b"), tmp_path / "runs", 1, 0.0).claim()
    Seeds(now, side("b"), tmp_path / "runs", 1, 0.0).claim()
    task.write_text("from tests.helpers.toy import Net as Mine\n")
    changed = replace(side("a"), files=sides._own_files())
    with pytest.raises(ConfigError, match=f"seeds that ran before {task.name} was changed"):
        Seeds(changed, side("b"), tmp_path / "runs", 1, 0.0).claim()


def test_the_launcher_of_a_config_is_not_an_experiments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runs start here: that of a file is left out of them, and one that is typed is refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(
        "defaults: [mlp, override /launcher: slurm, _self_]\n"
    )
    looked = look_at_side("a", "optimizer=adamw", ["conf=mine"])
    assert "launcher=none" in looked.subject.line(Changes("runs/x"), tmp_path, "a")
    with pytest.raises(ConfigError, match="'launcher=slurm' is for fit"):
        look_at_side("a", "optimizer=adamw", ["conf=mlp", "launcher=slurm"])


def test_the_result_is_a_table_a_page_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All say the same; what was not run is named."""
    pairs = [SeedPair(seed, record(1.0 + seed), record(0.9 + seed)) for seed in range(3)]
    result = ComparedConfigs("x=a", "x=b", "val/loss", "min", pairs, [3, 4], {"global batch": 64})
    facts = show(result, tmp_path)
    assert result.verdict == facts["verdict"] == "b better"
    assert facts["paired"]["high"] == pytest.approx(-0.1)
    assert facts["unpaired"]["low"] < -1 < 1 < facts["unpaired"]["high"]
    text, page = capsys.readouterr().out, (tmp_path / "reports/experiment.html").read_text()
    for said in ("seed 3, 4", "Cost of a: 3.0 s a run, 1.0 s of it training; 64 samples a run."):
        assert said in text.replace("\n", " ") and said in page
    assert verdict_line(result) in page and "Student 1908" in page
    assert [row["seed"] for row in facts["seeds"]] == [0, 1, 2]
