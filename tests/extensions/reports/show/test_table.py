"""`runs`: a table of the runs below a folder."""

from __future__ import annotations

import io
import json
import os
import socket
from pathlib import Path

import pytest
from rich.console import Console

from trainkit.config.of_run import joined
from trainkit.console import console_of
from trainkit.extensions.reports.show import runs_command as runs
from trainkit.extensions.reports.show.best import best_of, command_of, goal_of, print_best
from trainkit.extensions.reports.show.files import find_runs, read_any, read_runs
from trainkit.extensions.reports.show.page import groups, runs_grid
from trainkit.extensions.reports.show.table import print_table, sort_runs, table_of
from trainkit.launch.moments import Moment
from trainkit.run.goal import Goal
from trainkit.run.progress_file import Progress, write_progress
from trainkit.run.state import read_state, write_state

MONITOR = "callbacks: {checkpoint: {monitor: val/acc, mode: max}}\n"


def add_run(
    folder: Path, lr: str, values: list[float], state: str = "done", error: str = ""
) -> None:
    """Write what a run leaves."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(
        f"- conf=mlp\n- optimizer.lr={lr}\n- run_dir={folder}\n- seed=3\n"
    )
    if values:
        rows = "".join(f"{i},{10 * i},{value}\n" for i, value in enumerate(values))
        (folder / "metrics.csv").write_text("epoch,step,val/acc\n" + rows)
        (folder / "config.yaml").write_text(MONITOR + f"optimizer: {{lr: {lr}}}\n")
    write_state(folder, state, error)


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """Return a folder of three runs, two of them of a sweep."""
    add_run(tmp_path / "sweep1" / "10", "0.12345678901", [0.5, 0.9, 0.8])
    add_run(tmp_path / "sweep1" / "9", "0.5", [], "failed", "RuntimeError: boom\nmore")
    add_run(tmp_path / "one", "1e-05", [0.7])
    (tmp_path / "one" / "before-2026" / "checkpoints").mkdir(parents=True)
    (tmp_path / "sweep1" / "sweep").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("logged", "shown"),
    [("lr,train_loss,val_loss", ["val_loss"]), ("lr,loss_step,loss", ["loss_step", "loss"])],
)
def test_values_need_no_slash(logged: str, shown: list[str], tmp_path: Path) -> None:
    """`val_loss` is one of validation, and without any all are shown; the page has them, too."""
    add_run(tmp_path / "one", "0.1", [])
    (tmp_path / "one" / "metrics.csv").write_text(f"epoch,step,{logged}\n0,1,0.1,0.2,0.3\n")
    run = read_any(tmp_path / "one", "one")
    assert list(table_of([run], Goal()).columns) == ["run", *shown, "epochs", "state"]
    assert runs_grid([run]).columns == ("run", "epochs", "steps", *shown, "samples/s")
    assert next(iter(groups([run]))) == "loss"


def test_a_run_of_a_sweep_is_named_with_its_sweep(tmp_path: Path) -> None:
    """Beside others a number alone names nothing."""
    folders = [tmp_path / name for name in ("houses", "sweep/0", "sweep/1")]
    for folder in folders:
        add_run(folder, "0.1", [0.5])
    assert [run.name for run in read_runs(folders)] == ["houses", "sweep/0", "sweep/1"]


def test_runs_are_found_and_compared(top: Path) -> None:
    """Also a run that failed before it logged anything; numbers sort as numbers;
    the best run has a mark.
    """
    runs = find_runs(top)
    assert [run.name for run in runs] == ["one", "sweep1/9", "sweep1/10"]
    grid = table_of(runs, goal_of(runs))
    assert grid.columns == ("run", "optimizer.lr", "val/acc", "best val/acc", "epochs", "state")
    assert list(grid.rows) == [
        ("one", "1e-05", "0.7", "0.7", "1", "done"),
        ("sweep1/9", "0.5", "-", "-", "0", "failed"),
        ("sweep1/10 *", "0.123457", "0.8", "0.9", "3", "done"),
    ]
    assert (
        command_of(runs[2]) == "python -m trainkit fit conf=mlp optimizer.lr=0.12345678901 seed=3"
    )


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("val/acc", ["sweep1/10", "one", "sweep1/9"]),
        ("optimizer.lr", ["one", "sweep1/10", "sweep1/9"]),
        ("-optimizer.lr", ["sweep1/9", "sweep1/10", "one"]),
        ("state", ["one", "sweep1/10", "sweep1/9"]),
    ],
)
def test_runs_are_sorted(key: str, names: list[str], top: Path) -> None:
    """Best first by a monitored metric, those without it last;
    by a setting small ones first, or large ones.
    """
    runs = find_runs(top)
    assert [run.name for run in sort_runs(runs, key, goal_of(runs))] == names


def test_a_resumed_run_is_repeated_from_its_first_start(tmp_path: Path) -> None:
    """With what was typed at both starts;
    what only resumes it, or belongs to a search, is left out.
    """
    add_run(tmp_path / "a", "0.1", [0.5])
    file = tmp_path / "a" / ".hydra" / "overrides.yaml"
    now = ["conf=mlp", "ckpt_path=last", "resume=auto", "optimizer=adamw", "trainer.max_epochs=9"]
    typed = joined(["conf=mlp", "optimizer.lr=0.1", "optimizers.n=2", "seed=3", "data=x"], now)
    file.write_text("".join(f"- {line}\n" for line in [*typed, "callbacks.tune={}"]))
    (run,) = find_runs(tmp_path)
    assert (
        command_of(run)
        == "python -m trainkit fit conf=mlp optimizers.n=2 seed=3 data=x optimizer=adamw"
        " trainer.max_epochs=9"
    )


def test_the_table_of_a_search_has_what_was_searched(tmp_path: Path) -> None:
    """Not what a trial resumed from (PBT), nor all that was typed where one trial never started."""
    add_run(tmp_path / "0", "0.1", [0.5])
    add_run(tmp_path / "1", "0.2", [0.6])
    for trial, more in (("0", ""), ("1", "- ckpt_path=/x/ray/checkpoint_1\n")):
        file = tmp_path / trial / ".hydra" / "overrides.yaml"
        file.write_text(file.read_text() + "- callbacks.tune={}\n" + more)
    runs = find_runs(tmp_path)
    assert table_of(runs, Goal("val/acc", "max")).columns[:3] == ("run", "optimizer.lr", "val/acc")
    (tmp_path / "2").mkdir()
    write_state(tmp_path / "2", "failed", "the node is gone")
    runs = [read_any(tmp_path / str(i), str(i)) for i in range(3)]
    grid = table_of(runs, Goal("val/acc", "max"), ["optimizer.lr"])
    assert grid.columns[:3] == ("run", "optimizer.lr", "val/acc") and grid.rows[2][:2] == ("2", "-")


@pytest.mark.parametrize(
    ("launcher", "start", "end"),
    [
        ("none", "python", ""),
        ("horovodrun", "horovodrun -np 2 python", ""),
        ("torchrun", "torchrun --nproc-per-node 2", ""),
        ("srun", "srun --ntasks 2 python", ""),
        ("ray", "python", " launcher=ray launcher.num_workers=2"),
    ],
)
def test_a_run_is_repeated_on_its_ranks(
    launcher: str, start: str, end: str, tmp_path: Path
) -> None:
    """Fewer ranks would have another batch and rate."""
    add_run(tmp_path / "a", "0.1", [0.5])
    progress = Progress(Moment.now(), "host", 1, None, launcher=launcher, hosts={"host": [0, 1]})
    write_progress(tmp_path / "a", progress)
    (run,) = find_runs(tmp_path)
    assert command_of(run) == f"{start} -m trainkit fit conf=mlp optimizer.lr=0.1 seed=3{end}"


@pytest.mark.parametrize(
    ("launcher", "start", "note"),
    [
        ("horovodrun", "horovodrun -np 4 -H a:2,b:2 python", ""),
        ("launch", "python -m trainkit launch -np 4 -H a:2,b:2 -- python", ""),
        (
            "torchrun",
            "torchrun --nnodes 2 --nproc-per-node 2",
            "4 ranks on 2 hosts: start it on each, with --rdzv-backend c10d --rdzv-endpoint a:29500",
        ),
        ("srun", "srun --nodes 2 --ntasks 4 python", ""),
        ("env", "python", "4 ranks on 2 hosts, started by MASTER_ADDR, RANK and WORLD_SIZE"),
    ],
)
def test_a_run_is_repeated_on_its_hosts(
    launcher: str, start: str, note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many ranks on each; what a command cannot start alone has a note."""
    add_run(tmp_path / "a", "0.1", [0.5])
    hosts = {"a": [0, 1], "b": [2, 3]}
    write_progress(
        tmp_path / "a", Progress(Moment.now(), "a", 1, None, launcher=launcher, hosts=hosts)
    )
    (run,) = find_runs(tmp_path)
    assert command_of(run) == f"{start} -m trainkit fit conf=mlp optimizer.lr=0.1 seed=3"
    print_best([run], goal_of([run]), console_of(), ["show"])
    text = capsys.readouterr().out
    assert note in text and ("note" in text) == bool(note)


def test_runs_of_two_tasks_have_no_best_one(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An accuracy says nothing about a regression's; the tasks are named."""
    file = top / "one" / "config.yaml"
    file.write_text(file.read_text() + "task: {_target_: mine.Regression}\n")
    file = top / "sweep1" / "10" / "config.yaml"
    file.write_text(file.read_text() + "task: {_target_: mine.Classifier}\n")
    assert runs.main("runs", [str(top)]) == 0
    text = capsys.readouterr().out
    assert "best    none of 2 tasks (Regression, Classifier): val/acc is not comparable." in text
    assert "repeat" not in text and "choose" not in text and "*" not in text


@pytest.mark.parametrize("width", [50, 80, 200])
def test_the_table_is_as_wide_as_the_terminal(width: int, top: Path) -> None:
    """A run is a line; columns without room are named, and an error has a line of its own."""
    add_run(top / "bad", "0.3", [], "failed", "ConfigError: " + "a long sentence " * 20)
    runs, console = find_runs(top), Console(width=width, file=io.StringIO())
    print_table(runs, goal_of(runs), console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(len(line) for line in lines if line.startswith(("┏", "│"))) <= width
    assert sum(line.startswith("│") for line in lines) == 4
    errors = [line for line in lines if line.startswith("error")]
    assert errors[1] == "error   run sweep1/9: RuntimeError: boom" and len(errors) == 2
    assert any(line.startswith("no room for best val/acc") for line in lines) == (width == 50)


def test_without_a_direction_no_run_is_best(top: Path) -> None:
    """It would be a guess."""
    assert best_of(find_runs(top), Goal("val/acc")) is None


def test_the_command_prints_json(top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With exact settings, and the range of each metric."""
    assert runs.main("runs", [str(top), "--json", "sort=val/acc"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["best"] == "sweep1/10"
    first, *_, last = facts["runs"]
    assert first["settings"] == {"optimizer.lr": "0.12345678901"}
    assert first["metrics"]["val/acc"] == {"last": 0.8, "min": 0.5, "max": 0.9}
    assert (last["state"], last["error"]) == ("failed", "RuntimeError: boom\nmore")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["none"], "There is no folder none"),
        (["empty"], "There are no runs in empty"),
        (["empty", "top"], "There are 2 folders"),
        (["top", "sort=val/acd"], "Did you mean 'val/acc'?"),
        (["top", "sorted=val/acc"], "Did you mean 'sort'?"),
    ],
)
def test_a_wrong_request_is_explained(
    typed: list[str],
    said: str,
    top: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, and what to give."""
    monkeypatch.chdir(top.parent)
    (top.parent / "empty").mkdir(exist_ok=True)
    assert runs.main("runs", [str(top) if word == "top" else word for word in typed]) == 2
    assert said in capsys.readouterr().err


def test_a_killed_run_is_distinguished_from_a_running_one(tmp_path: Path) -> None:
    """By the process that its lock names."""
    write_state(tmp_path, "running")
    assert read_state(tmp_path).name == "killed"
    holder = {"host": "elsewhere", "pid": 1, "birth": "x"}
    (tmp_path / ".lock").write_text(json.dumps(holder))
    assert read_state(tmp_path).name == "running"  # another host's process cannot be seen
    (tmp_path / ".lock").write_text(
        json.dumps(holder | {"host": socket.gethostname(), "pid": os.getpid()})
    )
    assert read_state(tmp_path).name == "killed"  # another process had this number
    (tmp_path / "state.json").write_text("{")
    assert read_state(tmp_path).name == "-"
