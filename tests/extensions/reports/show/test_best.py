"""Which run is best, and the command that repeats it: one answer for a sweep's end, `runs` and
`show`.
"""

from __future__ import annotations

import io
import json
import shlex
from pathlib import Path

import pytest

from trainkit.console import console_of
from trainkit.errors import ConfigError
from trainkit.extensions.reports.show import command as show
from trainkit.extensions.reports.show import runs_command as runs
from trainkit.extensions.reports.show.best import best_of, chosen_goal, command_of, print_best
from trainkit.extensions.reports.show.files import find_runs, read_any
from trainkit.extensions.reports.show.table import print_table
from trainkit.run.goal import Goal, write_goal
from trainkit.run.state import write_state

ACC = Goal("val/acc", "max")


def add_run(
    top: Path, name: str, values: list[str], state: str = "done", config: str = "{}", *typed: str
) -> Path:
    """Write what a run leaves; `values` are the texts of val/acc."""
    folder = top / name
    (folder / ".hydra").mkdir(parents=True)
    lines = ["conf=mine", *typed, f"seed={len(name)}", f"run_dir={folder}"]
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(lines))
    rows = "".join(f"{epoch},{epoch},{value}\n" for epoch, value in enumerate(values))
    (folder / "metrics.csv").write_text("epoch,step,val/acc\n" + rows)
    (folder / "config.yaml").write_text(config)
    write_state(folder, state, "RuntimeError: [a,b] boom\nmore" * (state == "failed"))
    return folder


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_best_run_has_a_finite_last_value(mode: str, tmp_path: Path) -> None:
    """Not one that ended with nan, that failed, or that comes later with the same value; the order
    in which runs are given is of no account.
    """
    better, worse = ("0.9", "0.5") if mode == "max" else ("0.1", "0.5")
    add_run(tmp_path, "0", [better, "nan"])
    add_run(tmp_path, "1", [better, "inf" if mode == "max" else "-inf"])
    add_run(tmp_path, "2", [better], "failed")
    add_run(tmp_path, "9", [worse, better])
    add_run(tmp_path, "10", [better])
    add_run(tmp_path, "11", [better, worse])
    runs = find_runs(tmp_path)
    for ordered in (runs, runs[::-1]):
        best = best_of(ordered, Goal("val/acc", mode))
        assert best is not None and best.name == "9"
    assert best_of(runs[:3], Goal("val/acc", mode)) is None


def test_values_that_are_not_finite_are_read_from_both_logs(tmp_path: Path) -> None:
    """As text in metrics.csv, and beside the null of metrics.jsonl; a damaged cell is none."""
    add_run(tmp_path, "csv", ["0.5", "nan"])
    add_run(tmp_path, "damaged", ["0.5", "0.#"])
    folder = add_run(tmp_path, "jsonl", [])
    (folder / "metrics.csv").unlink()
    line = {"epoch": 0, "step": 3, "values": {"val/acc": None}, "nonfinite": {"val/acc": "nan"}}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    shown = {run.name: str(run.last("val/acc")) for run in find_runs(tmp_path)}
    assert shown == {"csv": "nan", "damaged": "0.5", "jsonl": "nan"}


def test_sweep_runs_and_show_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On metric, mode, run and command: by what the sweep compared, whatever callbacks monitor.
    `show` names the sweep of a run too; `runs` was given it.
    """
    config = "callbacks: {stop: {monitor: val/loss}}"
    folders = [
        add_run(tmp_path, f"{i}", [value], "done", config, f"lr=0.{i}")
        for i, value in enumerate(["0.5", "0.7", "0.6"])
    ]
    write_goal(tmp_path, ACC)
    assert runs.main("runs", [str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "best    run 1: val/acc = 0.7 (the last value, highest of 3 runs)\n" in text
    assert "repeat  python -m trainkit fit conf=mine lr=0.1 seed=1\n" in text
    assert show.main("show", [str(folder) for folder in folders[::-1]]) == 0
    shown = capsys.readouterr().out.replace(f"run {tmp_path.name}/", "run ")
    assert [line for line in text.splitlines() if line.startswith(("best", "repeat"))] == [
        line for line in shown.splitlines() if line.startswith(("best", "repeat"))
    ]
    facts = []
    for main, places in ((runs.main, [tmp_path]), (show.main, folders)):
        assert main(main.__module__.rpartition(".")[2], [*map(str, places), "--json"]) == 0
        facts.append(json.loads(capsys.readouterr().out))
    keys = ("metric", "mode", "command")
    assert [facts[0][key] for key in keys] == [facts[1][key] for key in keys]
    assert facts[1]["best"] == f"{tmp_path.name}/{facts[0]['best']}"
    assert facts[0]["mode"] == "max"


def test_without_a_goal_a_command_chooses_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says so; the command that is printed names the best run."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("0", "0.5"), ("1", "0.7"), ("2", "nan")):
        add_run(tmp_path / "runs" / "my grid", name, [value])
    assert runs.main("runs", ["runs/my grid"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("best    unknown: no callback of these runs monitors a value to compare by")
    choose = "choose  python -m trainkit runs 'runs/my grid' metric=val/acc mode=max"
    assert lines[at + 1 :] == [choose]
    words = shlex.split(choose.removeprefix("choose"))[3:]
    assert words[0] == "runs" and runs.main(words[0], words[1:]) == 0
    assert "best    run 1: val/acc = 0.7 (the last value, highest of 2 runs)" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "max"}, "metric is missing: metric=NAME mode=max"),
        ({"metric": "val/acc", "mode": "best"}, "it must be min or max"),
        ({"metric": "val/acd", "mode": "max"}, r"Did you mean 'val/acc'\? They logged val/acc"),
        ({"metric": "val/acc"}, "Give mode=min or mode=max"),
    ],
)
def test_a_goal_that_decides_nothing_is_refused(
    given: dict[str, str], said: str, tmp_path: Path
) -> None:
    """With what to type."""
    add_run(tmp_path, "0", ["0.5"])
    with pytest.raises(ConfigError, match=said):
        chosen_goal(find_runs(tmp_path), given)


def test_a_callback_gives_a_metric_its_mode(tmp_path: Path) -> None:
    """`metric=` alone is enough for a value that a callback monitors, be it not the first."""
    both = "callbacks: {a: {monitor: val/loss}, b: {monitor: val/acc, mode: max}}"
    add_run(tmp_path, "0", ["0.5"], "done", both)
    runs = find_runs(tmp_path)
    assert chosen_goal(runs, {}) == Goal("val/loss", "min")
    assert chosen_goal(runs, {"metric": "val/acc"}) == ACC
    assert chosen_goal(runs, {"metric": "val/acc", "mode": "min"}) == Goal("val/acc", "min")


def test_a_command_repeats_what_was_typed(tmp_path: Path) -> None:
    """An empty text and a key that is left out too."""
    add_run(tmp_path, "0", ["1"], "done", "{}", "~callbacks.ema", "data.root=", "a='x y'")
    command = command_of(read_any(tmp_path / "0", "0"))
    start = "python -m trainkit fit conf=mine"
    assert command == f"""{start} '~callbacks.ema' data.root= 'a='"'"'x y'"'"'' seed=1"""


@pytest.mark.parametrize(
    ("typed", "note"),
    [
        ([], None),
        (["callbacks.tune={}"], "the search ended it after epoch 1; the command trains all 5"),
        (["callbacks.tune={}", "ckpt_path=/x/1"], "the search started it from a checkpoint; the"),
    ],
)
def test_what_a_command_cannot_repeat_is_noted(
    typed: list[str], note: str | None, tmp_path: Path
) -> None:
    """A search ends trials early, and starts some from others' weights."""
    add_run(tmp_path, "0", ["1"], "done", "trainer: {max_epochs: 5}", *typed)
    file = io.StringIO()
    print_best(find_runs(tmp_path), ACC, console_of(file), ["runs"])
    lines = file.getvalue().splitlines()
    assert lines[1] == "repeat  python -m trainkit fit conf=mine seed=1"
    assert [line.startswith(f"note    {note}") for line in lines[2:]] == [True] * (note is not None)


@pytest.mark.parametrize("given", [[], ["output=there/page.html"]])
def test_a_folder_that_may_only_be_read_is_shown(
    given: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A colleague's run: the page is left out, with what to give; one that was asked for is an
    error.
    """

    def refuse(*given: object) -> None:
        raise PermissionError(13, "Permission denied")

    folder = add_run(tmp_path, "0", ["0.5"])
    monkeypatch.setattr(show, "write_show_page", refuse)
    assert show.main("show", [str(folder), "--json", *given]) == (2 if given else 0)
    shown = capsys.readouterr()
    assert "cannot be written: Permission denied. Give a" in " ".join(shown.err.split())
    assert given or json.loads(shown.out)["page"] is None


@pytest.mark.parametrize("width", [80, 120])
def test_failed_runs_are_last_in_a_table_that_fits(width: int, tmp_path: Path) -> None:
    """Below long names and lists; a value that is not finite is shown, and the first line of an
    error as it is.
    """
    add_run(tmp_path, "0", ["0.1"], "failed", "{}", "x=[a,b]")
    add_run(tmp_path, "1-" + "long_name/" * 9 + "end", ["nan"], "done", "{}", "x=[c,d]")
    add_run(tmp_path, "2", ["0.1"], "done", "{}", f"x=[{'callback,' * 3}]")
    file = io.StringIO()
    print_table(find_runs(tmp_path), ACC, console_of(file, width), needed=["x"])
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    cells = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    rows = [row for row in cells if row[-2]]
    assert ("no room for epochs" in lines) == (width == 120)  # and for more at 80
    assert [row[-2] for row in rows] == ["done", "done", "failed"]
    assert "nan" in rows[0] and "[a,b]" in rows[2]
    assert lines[-1] == "error   run 0: RuntimeError: [a,b] boom"
