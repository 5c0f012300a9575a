"""Logger: a run continues whatever happens to its loggers,
and the training thread does none of their work.
"""

from __future__ import annotations

import contextlib
import csv
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.toy import Line, Recorder, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import ModelCheckpoint
from trainkit.errors import ConfigError
from trainkit.loggers import CSVLogger, TensorBoardLogger, base
from trainkit.loggers.base import Logger, RunFacts


class Own(Logger):
    """Records its calls and threads, and fails in the given methods."""

    def __init__(self, *fails: str, error: type[Exception] = OSError) -> None:
        self.fails, self.error = fails, error
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[int] = set()

    def _note(self, method: str, what: Any) -> None:
        self.calls.append((method, what))
        self.threads.add(threading.get_ident())
        if method in self.fails:
            raise self.error("the disk is gone")

    def open(self, run: RunFacts) -> None:
        """See Logger."""
        self._note("open", run)

    def write_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        """See Logger."""
        self._note("write_metrics", (step, epoch, sorted(metrics)))

    def write_hyperparams(self, params: dict[str, Any]) -> None:
        """See Logger."""
        self._note("write_hyperparams", params)

    def finalize(self, status: str) -> None:
        """See Logger."""
        self._note("finalize", status)


def train(folder: Path, *loggers: Logger, task: Line | None = None, **settings: Any) -> Line:
    """Train two steps; return the task."""
    task = task or Line()
    known: dict[str, Any] = {
        "logger": list(loggers),
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    quiet(folder, **known | settings).fit(task, loader(8), loader(4))
    return task


def test_a_logger_hears_of_the_run_in_order(tmp_path: Path) -> None:
    """Opened, settings, each report with its step and epoch, closed;
    all in one thread other than the main one.
    """
    own, task = Own(), Line()
    task.hparams["width"] = 7
    train(tmp_path, own, task=task)
    (_, facts), *rest = own.calls
    assert (facts.run_dir, facts.global_step, facts.resumes, facts.task) == (
        tmp_path,
        0,
        False,
        "Line",
    )
    assert (facts.engine, facts.rank, facts.world_size) == ("single", 0, 1)
    assert rest == [
        ("write_hyperparams", {"width": 7}),
        ("write_metrics", (1, 0, ["lr", "train/loss"])),
        ("write_metrics", (2, 0, ["lr", "train/loss"])),
        ("write_metrics", (2, 0, ["val/loss"])),
        ("finalize", "success"),
    ]
    assert len(own.threads) == 1
    assert threading.get_ident() not in own.threads


@pytest.mark.parametrize("method", ["open", "write_hyperparams", "write_metrics", "finalize"])
def test_a_logger_that_fails_is_reported_once_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    """Whatever fails, training ends well, and the other loggers have all of it."""
    own, other = Own(method), CSVLogger()
    train(tmp_path, own, other)
    calls = capsys.readouterr().out
    assert calls.count("Own failed while") == 1
    assert "OSError: the disk is gone" in calls
    assert [name for name, _ in own.calls].count(method) == 1
    with (tmp_path / "metrics.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3


def test_what_a_logger_does_changes_nothing_of_the_training(tmp_path: Path) -> None:
    """Weights with a failing logger are bit-identical to those without any."""
    assert torch.equal(
        weights(train(tmp_path / "a", Own("write_metrics"))), weights(train(tmp_path / "b"))
    )


def test_a_mistake_in_the_settings_ends_the_run(tmp_path: Path) -> None:
    """A ConfigError of `open` is raised at the run's next log step, or at its end."""
    own, steps = Own("open", error=ConfigError), Recorder()

    class Waits(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            own.settle()

    with pytest.raises(ConfigError, match="the disk is gone"):
        train(tmp_path / "a", own, task=Waits(), callbacks=steps)
    assert len(steps.lrs) == 1
    with pytest.raises(ConfigError, match="the disk is gone"):
        train(tmp_path / "b", Own("finalize", error=ConfigError))


class Stuck(Own):
    """A network that does not answer until it is released."""

    finish_timeout_s = 0.05

    def __init__(self, in_open: bool = True) -> None:
        super().__init__()
        self.in_open, self.gate = in_open, threading.Event()

    def open(self, run: RunFacts) -> None:
        """Wait."""
        if self.in_open:
            self.gate.wait(30)
        super().open(run)

    def write_hyperparams(self, params: dict[str, Any]) -> None:
        """Wait."""
        self.gate.wait(30)
        super().write_hyperparams(params)


def test_a_network_that_does_not_answer_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training runs to its end while a logger is still opening,
    and the end waits for it no longer than its limit.
    """
    stuck = Stuck()
    train(tmp_path, stuck, max_epochs=3)
    assert stuck.calls == []
    assert "Stuck did not finish within 0.05 s" in capsys.readouterr().out
    stuck.gate.set()


@pytest.mark.parametrize("how", ["never opened", "failed"])
def test_who_has_no_time_does_not_wait_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """A server that never answered, and a run that failed, get the shorter of two limits."""
    monkeypatch.setattr(base, "_HURRY_S", 0.02)
    stuck = Stuck(in_open=how == "never opened")
    stuck.finish_timeout_s = 300.0

    class Fails(Line):
        def on_train_epoch_end(self) -> None:
            if how == "failed":
                raise KeyError("broken")

    with pytest.raises(KeyError) if how == "failed" else contextlib.nullcontext():
        train(tmp_path, stuck, task=Fails())
    assert "Stuck did not finish within 0.02 s" in capsys.readouterr().out
    stuck.gate.set()


def test_a_logger_that_asks_no_server_has_time_to_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As W&B offline, whose own process may start slowly: a short run's values are not lost."""
    monkeypatch.setattr(base, "_HURRY_S", 0.02)
    monkeypatch.setattr(Stuck, "asks_a_server", False)
    stuck = Stuck()
    stuck.finish_timeout_s = 300.0
    threading.Timer(0.3, stuck.gate.set).start()
    train(tmp_path, stuck)
    assert stuck.calls


@pytest.mark.parametrize(("error", "status"), [(KeyError("broken"), "failed"), (None, "success")])
def test_the_end_is_reported(tmp_path: Path, error: Exception | None, status: str) -> None:
    """A run that failed is closed as such, after all that it logged."""

    class Ends(Line):
        def on_train_epoch_end(self) -> None:
            if error is not None:
                raise error

    own = Own()
    try:
        train(tmp_path, own, task=Ends())
    except KeyError as raised:
        assert raised is error
    assert own.calls[-1] == ("finalize", status)
    assert [name for name, _ in own.calls].count("write_metrics") == 3


def test_a_second_fit_opens_again(tmp_path: Path) -> None:
    """A logger serves consecutive fits."""
    own = Own()
    trainer = quiet(tmp_path, logger=own, log_every_n_steps=1)
    for _ in range(2):
        trainer.fit(Line(), loader(8))
    assert [name for name, _ in own.calls] == 2 * [
        "open",
        "write_hyperparams",
        "write_metrics",
        "write_metrics",
        "finalize",
    ]


def test_an_evaluation_alone_is_a_run_of_its_own(tmp_path: Path) -> None:
    """Opened with the settings, and closed."""
    own = Own()
    quiet(tmp_path, logger=own).validate(Line(), loader(4))
    assert [call for call, *_ in own.calls] == [
        "open",
        "write_hyperparams",
        "write_metrics",
        "finalize",
    ]


def test_an_evaluation_after_a_fit_follows_its_values(tmp_path: Path) -> None:
    """At the fit's last step, without the settings once more."""
    own = Own()
    trainer = quiet(tmp_path, logger=[own, CSVLogger(), TensorBoardLogger()], max_epochs=1)
    task = Line()
    trainer.fit(task, loader(8), loader(4))
    own.calls.clear()
    trainer.validate(task, loader(4))
    assert [call for call, _ in own.calls] == ["open", "write_metrics", "finalize"]
    (_, facts), (_, values), _ = own.calls
    assert (facts.resumes, facts.follows) == (True, True)
    assert values == (2, 1, ["val/loss"])
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[:2] for row in rows[-2:]] == [["0", "2"], ["1", "2"]]
    files = sorted((tmp_path / "tensorboard").iterdir())
    accumulated = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert len(files) == 2
    assert [event.step for event in accumulated.Scalars("val/loss")] == [2, 2]


def test_an_evaluation_leaves_the_files_of_a_run_as_they_are(tmp_path: Path) -> None:
    """Another process may train there."""
    quiet(tmp_path, logger=True, max_epochs=1).fit(Line(), loader(8), loader(4))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    own = Own()
    trainer = quiet(tmp_path, logger=[own, CSVLogger(), TensorBoardLogger()])
    trainer.validate(Line(), loader(4))
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before
    assert [call for call, _ in own.calls] == [
        "open",
        "write_hyperparams",
        "write_metrics",
        "finalize",
    ]


def test_values_and_settings_of_the_users_own_reach_this_logger_alone(tmp_path: Path) -> None:
    """Outside of a run, values are refused; settings wait for it, and secrets are masked."""

    class Logs(Line):
        def on_train_start(self) -> None:
            """Log to the first logger."""
            own.log_metrics({"x": torch.tensor([2.0])})
            own.log_hyperparams({"late": 1})

    own, other = Own(), Own()
    own.log_hyperparams({"api_key": "hidden", "width": 3})
    with pytest.raises(ConfigError, match=r"Own\.log_metrics: this logger is open in fit"):
        own.log_metrics({"x": 1.0})
    train(tmp_path, own, other, task=Logs())
    assert ("write_metrics", (0, 0, ["x"])) in own.calls
    assert ("write_metrics", (0, 0, ["x"])) not in other.calls
    settings = [what for call, what in own.calls if call == "write_hyperparams"]
    given = {"api_key": "***", "width": 3}
    assert settings == [given, given | {"late": 1}]


def test_what_on_fit_end_logs_is_written(tmp_path: Path) -> None:
    """The loggers close after it."""

    class Last(Line):
        def on_fit_end(self) -> None:
            """Log."""
            self.log("last", 7.0)
            assert self.logger.native() is not None  # type: ignore[union-attr]

    quiet(tmp_path, logger=[TensorBoardLogger(), CSVLogger()], max_epochs=1).fit(Last(), loader(8))
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    place = header.split(",").index("last")
    assert [row.split(",")[place] for row in rows if row.split(",")[place]] == ["7.0"]


def test_the_librarys_object_outside_of_a_run_is_refused(tmp_path: Path) -> None:
    """Its calls would be lost in silence."""
    logger = TensorBoardLogger()
    message = "TensorBoardLogger.experiment: this logger is open in fit, validate and test alone"
    with pytest.raises(ConfigError, match=message):
        logger.experiment.add_text("a", "b")
    quiet(tmp_path, logger=logger, max_epochs=1).fit(Line(), loader(8))
    with pytest.raises(ConfigError, match=message):
        logger.experiment.add_text("a", "b")


def test_a_checkpoint_waits_for_what_was_logged_before_it(tmp_path: Path) -> None:
    """A run killed right after a checkpoint has all rows on disk that the checkpoint covers."""
    lines: list[int] = []

    class Slow(CSVLogger):
        gate = threading.Event()

        def write_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
            self.gate.wait(30)
            super().write_metrics(metrics, step, epoch)

    class Begins(Callback):
        def on_save_checkpoint(self, trainer: Any, task: Any, checkpoint: dict[str, Any]) -> None:
            threading.Timer(0.1, Slow.gate.set).start()

    class Looks(Callback):
        runs_last = True

        def on_save_checkpoint_end(self, trainer: Any, task: Any) -> None:
            lines.append(len((tmp_path / "metrics.csv").read_text().splitlines()))

    train(tmp_path, Slow(), callbacks=[Begins(), ModelCheckpoint(), Looks()])
    assert lines == [4]
