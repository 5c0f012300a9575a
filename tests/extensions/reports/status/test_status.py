"""`status`: what a run does, read from files of each state that a job can be in."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.errors import ConfigError
from trainkit.extensions.reports.status import command
from trainkit.extensions.reports.status.status import check_folder, read_status
from trainkit.extensions.reports.status.text import duration, facts_of, line_of
from trainkit.launch.moments import Moment
from trainkit.run.lock import birth
from trainkit.run.progress_file import FitStart, Progress, read_progress, write_progress
from trainkit.run.state import write_state


def progress(**changed: Any) -> Progress:
    """Return the progress of a job of two hosts; rank 0 is this process."""
    current = Progress(
        Moment.now(),
        socket.gethostname(),
        os.getpid(),
        birth(os.getpid()),
        hosts={"a": [0, 1], "b": [2]},
    )
    known: dict[str, Any] = {
        "step": 30,
        "total_steps": 120,
        "epoch": 1,
        "max_epochs": 4,
        "steps_per_s": 2.0,
    }
    return dataclasses.replace(
        current, **known | {"samples_per_s": 64.0, "seconds_left": 45.0} | changed
    )


def ended_process() -> tuple[int, str]:
    """Return number and birth of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        born = birth(process.pid)
        assert born is not None
    return process.pid, born


def state_of(folder: Path, current: Progress) -> tuple[str, str]:
    """Write the file, and return the state that is read."""
    write_progress(folder, current)
    status = read_status(folder, lambda seconds: None)
    return status.state, status.why


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    """All of it, and without the keys that a later version adds."""
    current = progress(
        starts=[FitStart(1.0, 0, 3, "start"), FitStart(2.0, 9, 2, "recovery")], num_starts=2
    )
    write_progress(tmp_path, current)
    assert read_progress(tmp_path) == current
    content = json.loads((tmp_path / "progress.json").read_text())
    (tmp_path / "progress.json").write_text(json.dumps(content | {"later": 1}))
    assert read_progress(tmp_path) == current
    (tmp_path / "progress.json").write_text("{")
    assert read_progress(tmp_path) is None


def test_a_living_rank_0_runs_or_waits(tmp_path: Path) -> None:
    """It waits once it has waited for others for longer than ten seconds,
    and than five usual steps.
    """
    assert state_of(tmp_path, progress()) == ("running", "training")
    waits = {"waiting_for": "the sums of gradients"}
    assert state_of(tmp_path, progress(**waits, still_s=9.0))[0] == "running"
    state, why = state_of(tmp_path, progress(**waits, still_s=11.0))
    assert (state, why) == (
        "waiting",
        "rank 0 has waited 11 s for other ranks (the sums of gradients)",
    )
    assert state_of(tmp_path, progress(**waits, still_s=11.0, steps_per_s=0.1))[0] == "running"
    assert state_of(tmp_path, progress(still_s=11.0))[0] == "running"  # a long step of its own


def test_a_killed_process_is_lost(tmp_path: Path) -> None:
    """Of this host by its number and birth,
    so that another process with its number is not taken for it.
    """
    pid, born = ended_process()
    assert state_of(tmp_path, progress(pid=pid, birth=born))[0] == "lost"
    assert state_of(tmp_path, progress(birth="another boot 1"))[0] == "lost"


@pytest.mark.parametrize(
    ("ended", "state"), [("done", "ended"), ("stopped", "stopped"), ("failed", "failed")]
)
def test_an_end_is_reported(ended: str, state: str, tmp_path: Path) -> None:
    """Although the process may live on, as a notebook does; a failure with its error."""
    assert state_of(tmp_path, progress(ended=ended, error="No room."))[0] == state
    write_state(tmp_path, "failed", "It broke later.")
    assert read_status(tmp_path).state == "failed"


def test_another_host_is_judged_by_its_file(tmp_path: Path) -> None:
    """A fresh file is a living process;
    an old one is watched, for the other clock may be behind, or ahead.
    """
    other = {"host": "another-host", "pid": 1}
    boot, now = "another boot", time.time()
    assert state_of(tmp_path, progress(**other, written=Moment(now, 5.0, boot)))[0] == "running"
    for behind_s in (700.0, -700.0):
        current = progress(**other, written=Moment(now - behind_s, 5.0, boot))
        write_progress(tmp_path, current)
        looks: list[float] = []
        assert read_status(tmp_path, looks.append).state == "lost" and sum(looks) >= 6

        def write(seconds: float, current: Progress = current) -> None:
            later = Moment(current.written.unix_s + 2, 7.0, boot)
            write_progress(tmp_path, dataclasses.replace(current, written=later, step=31))

        status = read_status(tmp_path, write)
        assert (
            status.state == "running" and status.progress is not None and status.progress.step == 31
        )


def test_an_elastic_job_with_a_driver_that_answers_waits(tmp_path: Path) -> None:
    """Rank 0 is gone, and the driver's port is open: the ranks are formed again;
    once it is closed, the job is lost.
    """
    pid, born = ended_process()
    with socket.create_server(("127.0.0.1", 0)) as driver:
        address = f"127.0.0.1:{driver.getsockname()[1]}"
        current = progress(pid=pid, birth=born, job="now", driver=address, ended="ranks changed")
        assert state_of(tmp_path, current) == (
            "waiting",
            f"the job's driver ({address}) forms the ranks again",
        )
    assert state_of(tmp_path, current)[0] == "lost"
    write_state(tmp_path, "failed", "No rank is left.")
    assert state_of(tmp_path, current) == ("failed", "No rank is left.")


def test_a_run_that_has_not_trained_yet_starts(tmp_path: Path) -> None:
    """There is a lock, and no progress;
    without a holder the run was lost, or failed before its first step.
    """
    (tmp_path / ".lock").write_text(
        json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "birth": birth(os.getpid())})
    )
    assert read_status(tmp_path).state == "starting"
    (tmp_path / ".lock").write_text("")
    assert read_status(tmp_path).state == "lost"
    write_state(tmp_path, "failed", "data.root does not exist.")
    assert (read_status(tmp_path).state, read_status(tmp_path).why) == (
        "failed",
        "data.root does not exist.",
    )


def test_a_run_that_is_started_again_starts(tmp_path: Path) -> None:
    """Another process holds the folder, and progress.json is still of the former."""
    (tmp_path / ".lock").write_text(
        json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "birth": birth(os.getpid())})
    )
    pid, born = ended_process()
    for ended in ("stopped", ""):
        assert state_of(tmp_path, progress(pid=pid, birth=born, ended=ended))[0] == "starting"


def test_alerts_come_from_all_ranks_in_order(tmp_path: Path) -> None:
    """What callbacks kept, stacks of a stall, capsules; a line that a crash has cut is left out."""
    write_progress(tmp_path, progress())
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "alerts-rank1.jsonl").write_text(
        '{"unix_s": 2.0, "step": 9, "rank": 1, "kind": "spike", "text": "s"}\n{"unix'
    )
    (logs / "alerts-rank0.jsonl").write_text(
        '{"unix_s": 1.0, "step": 8, "rank": 0, "kind": "straggler", "text": "r"}\n'
    )
    (logs / "stacks-rank1-77.txt").write_text(
        "rank 1, process 77, after step 9: waits for no rank\n\nThread"
    )
    (tmp_path / "capsules" / "step=12-rank=1").mkdir(parents=True)
    (tmp_path / "capsules" / "step=12-batch=50-rank=0").mkdir()
    status = read_status(tmp_path)
    kinds = ["straggler", "spike", "stall", "capsule", "capsule"]
    assert [alert.kind for alert in status.alerts] == kinds
    assert {(alert.step, alert.rank) for alert in status.alerts[3:]} == {(12, 0), (12, 1)}
    assert "rank 1, process 77, after step 9: waits for no rank" in status.alerts[2].text
    assert line_of(status).endswith("5 alerts")


def test_a_fit_writes_what_is_read(tmp_path: Path) -> None:
    """From Python too; a resumed one continues the list of starts, a new one begins it."""
    for epochs, starts in ((1, ["start"]), (2, ["start", "resume"])):
        quiet(tmp_path, max_epochs=epochs, enable_checkpointing=True).fit(
            Line(), loader(12), ckpt_path="auto"
        )
        status = read_status(tmp_path)
        assert status.progress is not None and (status.state, status.progress.ended) == (
            "ended",
            "done",
        )
        assert [start.how for start in status.progress.starts] == starts
        assert (status.progress.step, status.progress.total_steps) == (3 * epochs, 3 * epochs)
        assert status.checkpoints[-1].step == 3 * epochs
    facts = facts_of(status)
    assert (facts["state"], facts["ranks"], facts["restarts"]) == ("ended", 1, 1)
    quiet(tmp_path).fit(Line(), loader(12))
    again = read_progress(tmp_path)
    assert again is not None and again.num_starts == 1


def test_checkpoints_that_come_and_go_do_not_disturb(tmp_path: Path) -> None:
    """A draft is none yet, and one that cannot be read is left out: the job may be deleting it."""
    quiet(tmp_path, enable_checkpointing=True).fit(Line(), loader(12))
    (saved,) = read_status(tmp_path).checkpoints
    manifest = (tmp_path / "checkpoints" / saved.name / "manifest.json").read_text()
    draft = tmp_path / "checkpoints" / f".{saved.name}.1.draft"
    draft.mkdir()
    (draft / "manifest.json").write_text(manifest)
    (tmp_path / "checkpoints" / "epoch=9-step=9" / "manifest.json").mkdir(parents=True)
    assert [checkpoint.name for checkpoint in read_status(tmp_path).checkpoints] == [saved.name]


def test_a_fit_that_fails_says_so(tmp_path: Path) -> None:
    """With the error, as the command prints it."""

    class Broken(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("no such luck")

    with pytest.raises(RuntimeError):
        quiet(tmp_path).fit(Broken(), loader(12))
    status = read_status(tmp_path)
    assert (status.state, status.why) == ("failed", "RuntimeError: no such luck")


def test_a_loss_that_is_not_finite_is_an_alert(tmp_path: Path) -> None:
    """The warning that is printed is kept."""

    class Poisoned(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * float("nan")

    quiet(tmp_path, log_every_n_steps=1).fit(Poisoned(), loader(12))
    (alert,) = read_status(tmp_path).alerts
    assert alert.kind == "non-finite" and "the loss is nan at step" in alert.text


def test_a_quick_run_writes_nothing(tmp_path: Path) -> None:
    """fast_dev_run leaves no files."""
    quiet(tmp_path, fast_dev_run=True).fit(Line(), loader(12))
    assert not (tmp_path / "progress.json").exists()


def test_folders_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    """A path that is missing, a file, a folder of runs: each with what to give."""
    with pytest.raises(
        ConfigError, match=r"missing does not exist\. Give a run's folder.*trainkit runs"
    ):
        check_folder(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file"):
        check_folder(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"has none of config\.yaml.*No run has begun there yet"):
        check_folder(tmp_path)
    (tmp_path / "mlp" / "monday").mkdir(parents=True)
    write_progress(tmp_path / "mlp" / "monday", progress())
    with pytest.raises(ConfigError, match=r"The newest run below it is .*mlp/monday\."):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "takes one run's folder, and got 0"),
        (["a", "b"], "takes one run's folder, and got 2"),
        (["a", "every_s=2"], "add --watch"),
        (["a", "--watch", "every_s=0"], "every_s is '0'; it must be a number of seconds, from 0.1"),
        (["a", "--wach"], "'--wach' is no setting of status"),
    ],
)
def test_mistakes_are_explained(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and what is legal."""
    write_progress(tmp_path, progress())
    given = [str(tmp_path) if word == "a" else word for word in words] or ["every_s=1"]
    assert command.main("status", given) == 2
    assert text in capsys.readouterr().err


def test_watch_prints_lines_and_ends_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal: a line for each look; as JSON an object for each."""
    write_progress(tmp_path, progress(ended="done"))
    assert command.main("status", [str(tmp_path), "--watch"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "ended  step 30 of 120  epoch 2 of 4  2 steps/s, 64 samples/s  no checkpoint" in line
    assert command.main("status", [str(tmp_path), "--watch", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["progress"]["hosts"] == {"a": [0, 1], "b": [2]}


def test_the_table_says_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step, time left, hosts, starts, goodput, process."""
    starts = [FitStart(1.0, 0, 3, "start"), FitStart(2.0, 9, 2, "recovery")]
    write_progress(
        tmp_path,
        progress(starts=starts, num_starts=2, launcher="horovodrun", engine="horovod", job="now"),
    )
    (tmp_path / "goodput.json").write_text(
        json.dumps({"goodput": 0.5, "seconds": {"steps": 50, "saving": 50}})
    )
    assert command.main("status", [str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        "step 30 of 120 (25 %) epoch 2 of 4",
        "rate 2 steps/s, 64 samples/s 45 s left",
        "ranks 3 ranks on 2 hosts: a (0, 1), b (2) engine horovod under horovodrun, elastic",
        "checkpoint none yet",
        "starts 2; the last continued after a change of ranks at step 9; ranks 3 -> 2",
        "goodput 50.0 % of 1 min 40 s (the rest: saving 50 s)",
        f"rank 0 is process {os.getpid()} on {socket.gethostname()}",
    ):
        assert text in out, out


def test_durations() -> None:
    """Two units at most."""
    assert [duration(s) for s in (0.4, 59, 61, 3660, 90000)] == [
        "0 s",
        "59 s",
        "1 min 1 s",
        "1 h 1 min",
        "1 d 1 h",
    ]
