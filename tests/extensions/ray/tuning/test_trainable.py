"""Trials without Ray: the connection to their job, and the error of a job in words."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.config.compose import run as compose
from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.ray.launcher import RayLauncher
from trainkit.extensions.ray.tuning import link as wire
from trainkit.extensions.ray.tuning import trainable
from trainkit.extensions.ray.tuning.job import TrialJob, run_job
from trainkit.extensions.ray.tuning.trainable import error_in, number_of, trial
from trainkit.launch.job_launcher import FitConfig

WORKER = """
import sys
from trainkit.extensions.ray.tuning.link import connect
link = connect()
answers = [link.report({"val/acc": 0.5 + i}, f"/folder/{i}") for i in range(3)]
print(answers)
sys.exit(0 if answers == [True, True, False] else 1)
"""


class Job(TrialJob):
    """A job of another command."""

    @property
    def command(self) -> list[str]:
        """Run the arguments alone."""
        return list(self.arguments)


def job(command: list[str], folder: Path, num_workers: int = 1) -> Job:
    """Return a job that runs a command."""
    return Job(command, folder, folder / "output.txt", num_workers, {"CPU": 1}, "127.0.0.1")


def test_reports_pass_and_the_answer_ends_a_run(tmp_path: Path) -> None:
    """Each report arrives with its checkpoint's folder; the job learns when its trial ends."""
    seen: list[tuple[dict[str, Any], str | None]] = []

    def report(metrics: dict[str, Any], folder: str | None) -> bool:
        seen.append((metrics, folder))
        return len(seen) < 3

    code = run_job(job([sys.executable, "-c", WORKER], tmp_path), dict(os.environ), report)
    assert code == 0, (tmp_path / "output.txt").read_text()
    assert seen == [({"val/acc": 0.5 + i}, f"/folder/{i}") for i in range(3)]


def test_an_error_of_a_report_ends_the_job_first(tmp_path: Path) -> None:
    """Tune ends a trial by SystemExit within a report:
    the job is asked to stop, and then the error is raised.
    """

    def report(metrics: dict[str, Any], folder: str | None) -> bool:
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        run_job(job([sys.executable, "-c", WORKER], tmp_path), dict(os.environ), report)
    assert (tmp_path / "output.txt").read_text().startswith("[False")


def test_a_stranger_is_not_heard() -> None:
    """A message that is not signed with the trial's secret is no report."""
    server, seen = wire.TrialServer("127.0.0.1"), []
    running = [True]
    thread = threading.Thread(
        target=server.serve, args=(lambda *report: seen.append(report) or True, lambda: running[0])
    )
    thread.start()
    host, _, port = next(iter(server.variables.values())).partition(":")
    with socket.create_connection((host, int(port))) as stranger:
        link = wire.TrialLink(stranger, "0" * 64)
        with pytest.raises(EngineError, match="The process of this trial has ended"):
            link.report({"val/acc": 1.0}, None)
        link.close()
    running[0] = False
    thread.join()
    server.close()
    assert seen == []


@pytest.mark.parametrize("num_workers", [0, -1, 1.5, (2, 8), "2"])
def test_a_trial_has_a_fixed_number_of_ranks(num_workers: Any) -> None:
    """Another number is refused before anything starts."""
    with pytest.raises(ConfigError, match="num_workers is"):
        trial(["conf=mlp"], num_workers=num_workers)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("run_dir=/mine", r"run_dir is given, and a trial's run has a folder .*, folder=\.\.\."),
        ("launcher=ray", r"launcher is given, .* Leave it out, and give trial\(num_workers=N\)"),
        ("+launcher.num_workers=2", r"launcher\.num_workers is given"),
    ],
)
def test_overrides_that_a_trial_sets_itself_are_refused(word: str, message: str) -> None:
    """A run_dir had no effect; ranks of a launcher would wait for what the trials hold."""
    with pytest.raises(ConfigError, match=message):
        trial(["conf=mlp", word])


def test_a_launcher_in_the_config_of_a_trial_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks are asked for beside the trials', which hold all CPUs: all wait."""
    fit = FitConfig({"trainer": {}, "launcher": {}}, "auto", frozenset())
    assert RayLauncher.refuses(fit) is None
    monkeypatch.setenv("TRAINKIT_TRIAL_ADDRESS", "127.0.0.1:1")
    assert "give search.num_workers=N" in str(RayLauncher.refuses(fit))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Error: optimizer.lr is -1; it must be above 0.\n",
            "optimizer.lr is -1; it must be above 0.",
        ),
        ("epoch 1\nError: no data.\nmore\n", "no data.\nmore"),
        (
            "Traceback\n  x\nValueError: bad\n",
            "the run ended with exit code 1:\nTraceback\n  x\nValueError: bad",
        ),
        ("", "the run ended with exit code 1:"),
        (
            "[0]<stdout>:epoch 1\n[1]<stderr>:Error on rank 1: no data.\n[elastic] the job ends\n",
            "no data.",
        ),
    ],
)
def test_the_error_of_a_job(text: str, expected: str) -> None:
    """What a job printed holds its error; else the last lines are quoted."""
    assert error_in(text, 1) == expected


class Stored:
    """A checkpoint of Tune's, on a file system of pyarrow's."""

    path = "/tune/checkpoint_1"

    def __init__(self, filesystem: str) -> None:
        self.filesystem = type(filesystem, (), {})()

    def to_directory(self, path: str) -> str:
        """Download it."""
        Path(path).mkdir()  # where nothing of an earlier one is
        return path


class Fakes:
    """Ray, Tune and the jobs of a trial's actor."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, checkpoint: Stored | None = None
    ) -> None:
        self.jobs: list[TrialJob] = []
        self.nodes = [{"Alive": True}]
        self.trial_id = "ab12_00003"
        self.folder = folder
        context = SimpleNamespace(
            get_trial_id=lambda: self.trial_id, get_trial_dir=lambda: str(folder)
        )
        tune = SimpleNamespace(get_context=lambda: context, get_checkpoint=lambda: checkpoint)
        address = SimpleNamespace(gcs_address="127.0.0.1:1")
        ray = SimpleNamespace(
            util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
            get_runtime_context=lambda: address,
            nodes=lambda: self.nodes,
        )
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setattr(trainable, "load_tune", lambda: tune)
        monkeypatch.setattr(trainable, "run_job", lambda job, *_: self.jobs.append(job) or 0)

    def run(self, words: list[str], folder: str | None) -> None:
        """Run a trial's function."""
        arguments: tuple[Any, ...] = ({}, words, str(self.folder), folder, 1, {"CPU": 1}, "")
        thread = threading.Thread(target=trainable._run, args=arguments)
        thread.start()  # it names its thread
        thread.join()


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (None, None),
        ("LocalFileSystem", Stored.path),
        ("S3FileSystem", "{run_dir}/started_from"),
    ],
)
def test_a_trial_begins_at_the_checkpoint_that_tune_names(
    stored: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `resume=auto` of the search too, which would take the trial's own in its place: PBT gives
    it another trial's; in a store's file system its path names nothing on this host.
    """
    (tmp_path / "3" / "started_from").mkdir(parents=True)
    exploited = expected and expected.format(run_dir=tmp_path / "3")
    checkpoint = None if stored is None else Stored(stored)
    fakes = Fakes(monkeypatch, tmp_path, checkpoint)
    words = ["conf=mlp", "resume=auto", "callbacks.tune={_target_: trainkit.callbacks.TuneReport}"]
    fakes.run(words, str(tmp_path))
    composed: list[Any] = []
    compose("fit", list(fakes.jobs[0].arguments), True, composed.append)
    config = composed[0].config
    beginning = (config.get("ckpt_path"), config.get("resume"))
    assert beginning == ((None, "auto") if exploited is None else (exploited, None))


@pytest.mark.parametrize(
    ("nodes", "trial_id", "has_folder", "expected"),
    [(2, "a_00000", False, 1), (2, "a_00001", False, 0), (1, "a_00000", False, 0)]
    + [(2, "a_00000", True, 0)],
)
def test_a_line_names_runs_that_stay_on_their_node(
    nodes: int,
    trial_id: str,
    has_folder: bool,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the first trial alone; a folder of all trials, or a cluster of one node, needs none."""
    fakes = Fakes(monkeypatch, tmp_path)
    fakes.nodes = [{"Alive": True}] * nodes + [{"Alive": False}]
    fakes.trial_id = trial_id
    fakes.run(["conf=mlp"], str(tmp_path) if has_folder else None)
    assert capsys.readouterr().out.count("trial(..., folder=...)") == expected


def test_the_number_of_a_trial() -> None:
    """Trials are numbered from 0, whatever Tune's id looks like."""
    assert [number_of(name) for name in ("ab12_00000", "ab12_00010", "odd")] == ["0", "10", "odd"]
