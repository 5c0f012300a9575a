"""`show`: curves, rates and checkpoints of runs, read from their folders."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.errors import ConfigError
from trainkit.extensions.reports.show import command as show
from trainkit.extensions.reports.show.differences import settings_grid
from trainkit.extensions.reports.show.files import read_runs
from trainkit.extensions.reports.show.page import (
    checkpoints_grid,
    curves,
    groups,
    runs_grid,
    throughput,
)
from trainkit.loggers import CSVLogger, JSONLLogger


def train(folder: Path, jsonl: bool = False, lr: float = 0.1) -> Path:
    """Train two epochs, with a config beside the metrics."""
    settings = {
        "logger": [JSONLLogger() if jsonl else CSVLogger()],
        "log_every_n_steps": 1,
        "max_epochs": 2,
    }
    quiet(folder, callbacks=[ModelCheckpoint(monitor="val/loss", save_top_k=2)], **settings).fit(
        Line(lr), loader(12), loader(4)
    )
    (folder / "config.yaml").write_text(
        f"optimizer: {{lr: {lr}}}\ntask: {{optimizer: {{lr: {lr}}}, width: 3}}\nrun_dir: {folder}\n"
    )
    return folder


@pytest.mark.parametrize("jsonl", [False, True])
def test_a_run_is_read_from_its_folder(jsonl: bool, tmp_path: Path) -> None:
    """Each metric has a series by step; checkpoints are marked as best and last;
    epochs and steps are counted.
    """
    (run,) = read_runs([train(tmp_path / "a", jsonl)])
    assert (run.name, run.epochs, run.steps) == ("a", 2, 6)
    assert run.series["lr"] == ([1, 2, 3, 4, 5, 6], [0.1] * 6)
    assert run.series["val/loss"][0] == [3, 6]
    assert {mark for saved in run.checkpoints for mark in saved.marks} == {"best", "last"}
    assert run.rates()[0] == [6]
    assert [row[3:5] for row in checkpoints_grid([run]).rows] == [
        (str(saved.step), f"{saved.metrics['val/loss']:.4g}") for saved in run.checkpoints
    ]


def test_runs_are_compared(tmp_path: Path) -> None:
    """Folders of one name are distinguished by their parents;
    a setting that the task refers to is shown once.
    """
    runs = read_runs([train(tmp_path / "x/run", lr=0.1), train(tmp_path / "y/run", lr=0.05)])
    assert [run.name for run in runs] == ["x/run", "y/run"]
    differ = settings_grid(runs)
    assert differ is not None and differ.rows == [("optimizer.lr", "0.1", "0.05")]
    assert [row[:3] for row in runs_grid(runs).rows] == [("x/run", "2", "6"), ("y/run", "2", "6")]


def test_ranks_and_global_batch_differ_too(tmp_path: Path) -> None:
    """They are rows above the settings where two runs differ, and only there."""
    runs = read_runs([train(tmp_path / name) for name in ("a", "b", "c")])
    assert settings_grid(runs) is None
    file = tmp_path / "b/progress.json"
    progress = json.loads(file.read_text())
    file.write_text(json.dumps({**progress, "hosts": {"here": [0, 1]}}))
    (tmp_path / "c/progress.json").unlink()
    manifest = next((tmp_path / "c/checkpoints").glob("*-step=6/manifest.json"))
    held = json.loads(manifest.read_text())
    held["contract"]["batch_size"] *= 2
    manifest.write_text(json.dumps(held))
    differ = settings_grid(read_runs([tmp_path / name for name in ("a", "b", "c")]))
    assert differ is not None
    assert differ.rows == [("ranks", "1", "2", "-"), ("global batch", "4", "4", "8")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.csv", b"epoch,step,loss,acc\n0,1,2.5,1\n0,2,\xff,1\n"),
        (
            "metrics.jsonl",
            b'{"epoch": 0, "step": 1, "values": {"loss": 2.5, "acc": 1}}\n5\n{"epoch": 0}\n',
        ),
    ],
)
def test_damaged_files_of_a_run_are_read_as_far_as_they_go(
    name: str, content: bytes, tmp_path: Path
) -> None:
    """Cells, lines, a manifest and a report of another form leave the rest."""
    (tmp_path / name).write_bytes(content)
    (tmp_path / "goodput.json").write_text("5")
    (tmp_path / "checkpoints/a").mkdir(parents=True)
    (tmp_path / "checkpoints/a/manifest.json").write_text('"x"')
    (run,) = read_runs([tmp_path])
    assert run.series["loss"] == ([1], [2.5])
    assert (run.checkpoints, run.goodput) == ([], {})


def test_values_of_one_kind_share_a_chart(tmp_path: Path) -> None:
    """A loss of training is drawn with that of validation;
    the loss comes first, rates after what was measured.
    """
    (tmp_path / "metrics.csv").write_text(
        "epoch,step,lr,train/loss_step,train/loss_epoch,val/loss,val/acc,"
        "throughput/samples_per_s,throughput/step_ms_p50,gradients/norm\n"
        "0,1,0.1,2,,,,90,3,1\n0,2,,,1.5,1.6,0.5,,,\n0,3,nan,,,,,,,\nbroken"
    )
    (run,) = read_runs([tmp_path])
    found = groups([run])
    assert list(found) == ["loss", "acc", "step time, ms", "gradients", "learning rate"]
    assert found["loss"] == ["train/loss_step", "train/loss_epoch", "val/loss"]
    assert run.rates() == ([1], [90.0])


@pytest.mark.parametrize(
    ("steps", "own"),
    [([7], ([5.5, 8.5], 1)), ([1, 2, 11], (None, 1)), ([1, 50], (None, None))],
)
def test_steps_are_whole_numbers(
    steps: list[int], own: tuple[list[float] | None, int | None], tmp_path: Path
) -> None:
    """An axis of few steps has ticks one step apart, where plotly would choose halves;
    one of a single step has a neighbour on each side.
    """
    lines = "".join(f"0,{step},2.5,90\n" for step in steps)
    (tmp_path / "metrics.csv").write_text(f"epoch,step,loss,throughput/samples_per_s\n{lines}")
    runs = read_runs([tmp_path])
    for chart in (curves(runs, ["loss"]), throughput(runs)):
        shown = chart.layout.xaxis.range
        assert ((None if shown is None else [*shown]), chart.layout.xaxis.dtick) == own


@pytest.mark.parametrize(
    ("values", "shown"),
    [([0.02, 0.02], (0, 0.04)), ([-2.0], (-4, 0)), ([0.0], (0, 1)), ([1.0, 2.0], None)],
)
def test_a_constant_stands_between_zero_and_twice_itself(
    values: list[float], shown: tuple[float, float] | None, tmp_path: Path
) -> None:
    """A constant rate of 0.02 is not drawn as zero between -1 and 1."""
    lines = "".join(f"0,{step},{value}\n" for step, value in enumerate(values))
    (tmp_path / "metrics.csv").write_text(f"epoch,step,lr\n{lines}")
    assert curves(read_runs([tmp_path]), ["lr"]).layout.yaxis.range == shown


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run's page is in its folder, that of several in the first one's,
    or where `output` says.
    """
    first, second = train(tmp_path / "a"), train(tmp_path / "b")
    assert show.main("show", [str(first)]) == 0
    page = re.sub(r"</?(wbr|span)[^>]*>", "", (first / "reports/show.html").read_text())
    for word in (
        "learning rate",
        "Samples per second",
        "Checkpoints",
        "val/loss",
        "epoch=1-step=6",
    ):
        assert word in page
    assert "What differs" not in page
    (first / "goodput.json").write_text(json.dumps({"seconds": {"steps": 3.0, "down": 1.0}}))
    assert show.main("show", [str(first), str(second), f"output={tmp_path / 'both.html'}"]) == 0
    assert "a: val\\u002floss" in (tmp_path / "both.html").read_text()
    assert "both.html" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["no"], "There is no folder"),
        (["RUN", "RUN"], "named twice"),
        (["EMPTY"], "neither metrics.csv"),
        (["output=x"], "no run"),
    ],
)
def test_a_wrong_request_is_explained(
    typed: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and what to give."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.csv").write_text("epoch,step,lr\n0,1,0.1\n")
    (tmp_path / "empty").mkdir()
    places = {"RUN": str(tmp_path / "run"), "EMPTY": str(tmp_path / "empty")}
    assert show.main("show", [places.get(word, word) for word in typed]) == ConfigError.exit_code
    assert said in capsys.readouterr().err
