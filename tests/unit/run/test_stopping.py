"""A signal ends a fit at a step with a checkpoint and the code 75,
and the run resumes bit for bit.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.helpers.resuming import BreaksOff, assert_same_run, newest
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, Net, Recorder, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.api.view import RunView
from trainkit.callbacks import ModelCheckpoint
from trainkit.checkpoint.format import verify, write
from trainkit.checkpoint.store import LocalStore
from trainkit.engine.signals import HANDLED, Signals
from trainkit.errors import CheckpointError, Preempted
from trainkit.loggers import CSVLogger
from trainkit.loggers.base import Logger, RunFacts
from trainkit.trainer import Trainer


class Noisy(Net):
    """Dropout, batch norm, momentum; validation draws random numbers too."""

    def __init__(self) -> None:
        super().__init__(lr=0.05, momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log the epoch's mean too."""
        loss = super().training_step(batch, batch_idx)
        self.log("train/epoch", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss under noise."""
        x, y = batch
        self.log("val/loss", functional.mse_loss(self(x + 0.1 * torch.randn_like(x)), y))


class Asked(BreaksOff):
    """Sends a signal to this very process, once."""

    def __init__(
        self, after: int, hook: str = "step", number: signal.Signals = signal.SIGTERM
    ) -> None:
        super().__init__(after, hook)
        self.number = number

    def reached(self, trainer: RunView) -> None:
        """Send it."""
        os.kill(os.getpid(), self.number)
        self.after = -1


@pytest.fixture(autouse=True)
def seen() -> Iterator[list[str]]:
    """The names of the signals that reach the handlers which were there before;
    a signal that goes astray ends no test run.
    """
    names: list[str] = []
    before = {
        number: signal.signal(number, lambda n, _: names.append(signal.Signals(n).name))
        for number in HANDLED
    }
    yield names
    for number, handler in before.items():
        signal.signal(number, handler)


def begin(folder: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    """Train two epochs of 6 steps, each followed by a validation of 3 batches, from "auto";
    return the trainer.
    """
    known: dict[str, Any] = {
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "logger": CSVLogger(),
        "enable_checkpointing": True,
    }
    trainer = quiet(folder, callbacks=list(callbacks), **(known | settings))
    trainer.fit(Noisy(), loader(23, shuffle=True), loader(11), ckpt_path="auto")
    return trainer


def asked(folder: Path, *callbacks: Callback, **settings: Any) -> str:
    """Start a run that receives a signal; return its output."""
    with pytest.raises(Preempted) as ended:
        begin(folder, *callbacks, **settings)
    assert ended.value.code == 75
    return ended.value.text


@pytest.mark.parametrize("number", HANDLED)
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(
    tmp_path: Path, number: signal.Signals, seen: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of the three signals ends the fit after the current step, with 75;
    the old handlers are restored.
    """
    handlers = [signal.getsignal(n) for n in HANDLED]
    text = asked(tmp_path, Asked(3, number=number))
    assert (
        text == f"{number.name} on rank 0: the run ended after step 4; to resume: ckpt_path=last"
        f" run_dir={tmp_path}"
    )
    assert text in capsys.readouterr().out
    assert verify(newest(tmp_path))["global_step"] == 4
    assert [signal.getsignal(n) for n in HANDLED] == handlers
    assert seen == []


@pytest.mark.parametrize("after", [0, 2, 4, 5, 6, 9])
def test_a_signalled_run_resumes_to_the_same_bits(tmp_path: Path, after: int) -> None:
    """Asked in the first step, inside an epoch, in an epoch's last step or the first of the next:
    the end is the same.
    """
    begin(tmp_path / "whole")
    asked(tmp_path / "parts", Asked(after))
    assert begin(tmp_path / "parts").global_step == 12
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(("after", "interval"), [(2, 2), (4, 2), (10, 2), (6, 3), (6, 6)])
def test_a_validation_that_was_interrupted_is_run_again(
    tmp_path: Path, after: int, interval: int
) -> None:
    """After a signal during a validation, inside an epoch or at its end,
    the run resumes there and ends the same.
    """
    rounds: list[int] = []

    class Rounds(Callback):
        def on_validation_start(self, trainer: RunView, task: Any) -> None:
            rounds.append(trainer.global_step)

    settings = {"val_check_interval": interval}
    begin(tmp_path / "whole", **settings)
    asked(tmp_path / "parts", Asked(after, "validation"), **settings)
    begin(tmp_path / "parts", Rounds(), **settings)
    assert rounds[0] == after
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_asked_again_and_again_the_run_ends_the_same(tmp_path: Path) -> None:
    """A run that is signalled after each of its steps,
    and during each validation, ends the same.
    """
    begin(tmp_path / "whole", val_check_interval=2)
    for after in range(1, 11):
        asked(
            tmp_path / "parts",
            Asked(after, "step" if after % 2 else "validation"),
            val_check_interval=2,
        )
    begin(tmp_path / "parts", val_check_interval=2)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(("after", "hook", "interval"), [(11, "step", None), (12, "validation", 6)])
def test_asked_in_its_last_moments_the_run_logs_its_end_once(
    tmp_path: Path, after: int, hook: str, interval: int | None
) -> None:
    """After a signal in the last epoch's last step, or its validation,
    the run resumes with the rest: the same rows.
    """
    begin(tmp_path / "whole", val_check_interval=interval)
    asked(tmp_path / "parts", Asked(after, hook), val_check_interval=interval)
    begin(tmp_path / "parts", val_check_interval=interval)
    assert (tmp_path / "parts" / "metrics.csv").read_text() == (
        tmp_path / "whole" / "metrics.csv"
    ).read_text()


def test_a_signal_in_the_last_step_lets_the_run_end_well(tmp_path: Path) -> None:
    """If nothing is left to do, the run ends as done, and not as preempted."""
    settings = {"max_steps": 8, "max_epochs": None, "limit_val_batches": 0}
    begin(tmp_path / "whole", **settings)
    assert begin(tmp_path / "asked", Asked(7), **settings).global_step == 8
    assert_same_run(tmp_path / "asked", tmp_path / "whole")


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """A signal that the parent process ignores (nohup) neither ends the run nor gets a handler."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert begin(tmp_path, Asked(3, number=signal.SIGINT)).global_step == 12
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_second_signal_within_a_second_is_ignored(
    monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> None:
    """A signal that follows at once has no effect;
    a later one has that of a process without a fit.
    """
    with Signals() as signals:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert (signals.received, seen) == ("SIGTERM", [])
        monkeypatch.setattr("trainkit.engine.signals._SAME_S", -1.0)
        os.kill(os.getpid(), signal.SIGINT)
        assert seen == ["SIGINT"]
        os.kill(os.getpid(), signal.SIGTERM)  # all handlers are back
        assert seen == ["SIGINT", "SIGTERM"]


@pytest.mark.parametrize(
    "keepers", [[], [ModelCheckpoint(save_weights_only=True)]], ids=["none", "weights alone"]
)
def test_without_a_checkpoint_to_resume_from_it_is_reported(
    tmp_path: Path, keepers: list[Callback]
) -> None:
    """A run without checkpoints, or with only weights, ends too,
    and reports that it cannot be resumed.
    """
    text = asked(tmp_path, Asked(3), *keepers, enable_checkpointing=bool(keepers))
    assert text == "SIGTERM on rank 0: the run ended after step 4; no checkpoint was requested."


@pytest.mark.parametrize("num_written", [0, 1])
def test_a_signalled_run_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_written: int
) -> None:
    """If this start has written nothing, 75 would have it started again and again; after an earlier
    checkpoint of its own the next one gets further.
    """
    names = list[str]()

    def full(folder: Path, *args: Any) -> None:
        names.append(folder.name)
        if len(names) > num_written:
            raise OSError("No space left on device")
        write(folder, *args)

    monkeypatch.setattr("trainkit.checkpoint.store.write", full)
    if num_written:
        text = asked(tmp_path, Asked(8))
        assert text.endswith("step 9; its checkpoint was NOT written; older ones are left.")
    else:
        with pytest.raises(CheckpointError, match=r"not one checkpoint.*No space left on device"):
            begin(tmp_path, Asked(8))
    assert len(names) == 2


def test_a_checkpoint_is_written_also_where_it_is_not_among_the_best(tmp_path: Path) -> None:
    """With a monitor and save_last=false, a signal still saves a checkpoint of its step."""
    arguments: dict[str, Any] = {"monitor": "val/loss", "save_last": False}
    asked(tmp_path, ModelCheckpoint(**arguments), Asked(8))
    assert "epoch=1-step=9" in LocalStore(tmp_path / "checkpoints").names()
    steps = Recorder()
    begin(tmp_path, ModelCheckpoint(**arguments), steps)
    assert len(steps.lrs) == 3


class Closes(Logger):
    """Notes how it was closed."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def open(self, run: RunFacts) -> None:
        """Nothing to open."""

    def write_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        """Nothing to write."""

    def finalize(self, status: str) -> None:
        """Note it."""
        self.said.append(status)


def test_a_signal_is_no_error(tmp_path: Path) -> None:
    """on_exception is not called, teardown is, and loggers are closed once."""

    class Notes(Callback):
        said: list[str] = []

        def on_exception(self, trainer: RunView, task: Any, exception: BaseException) -> None:
            self.said.append("exception")

        def teardown(self, trainer: RunView, task: Any, stage: str) -> None:
            self.said.append("teardown")

    notes, logger = Notes(), Closes()
    asked(tmp_path, notes, Asked(3), logger=logger)
    assert notes.said == ["teardown"]
    assert logger.said == ["preempted"]


class Noted(BreaksOff):
    """A signal that came to rank 1."""

    def reached(self, trainer: RunView) -> None:
        """Note it by hand: threads get no signals."""
        if trainer.global_rank == 1:
            trainer.stopping.signals.received = "SIGUSR1"


def on_ranks(folder: Path, *callbacks: Callback) -> list[tuple[str, int, torch.Tensor]]:
    """Train on 2 ranks; return for each the message of an early end, the last step,
    and the weights.
    """

    def work(engine: ThreadEngine) -> tuple[str, int, torch.Tensor]:
        trainer = quiet(
            folder,
            callbacks=list(callbacks),
            engine=engine,
            max_epochs=40,
            enable_checkpointing=True,
        )
        task, text = Line(), ""
        try:
            trainer.fit(task, loader(24, 3), loader(12, 2), ckpt_path="auto")
        except Preempted as ended:
            text = ended.text
        return text, trainer.global_step, weights(task)

    return World(2).run(work)


@pytest.mark.parametrize("hook", ["step", "validation"])
def test_a_signal_to_one_rank_ends_all_at_the_same_step(tmp_path: Path, hook: str) -> None:
    """All ranks leave after the same step and name the signalled rank;
    resumed, the run ends the same.
    """
    whole = on_ranks(tmp_path / "whole")
    first, second = on_ranks(tmp_path / "parts", Noted(8, hook))
    assert first[:2] == second[:2]
    assert first[0].startswith(f"SIGUSR1 on rank 1: the run ended after step {first[1]}; to resume")
    assert 8 <= first[1] < 160
    assert verify(newest(tmp_path / "parts"))["global_step"] == first[1]
    for (_, step, ours), (_, _, theirs) in zip(on_ranks(tmp_path / "parts"), whole, strict=True):
        assert step == 160
        assert torch.equal(ours, theirs)


def test_a_fit_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    """If Python allows no handlers, a fit trains all the same."""
    handlers, trained = [signal.getsignal(n) for n in HANDLED], []
    thread = threading.Thread(target=lambda: trained.append(begin(tmp_path).global_step))
    thread.start()
    thread.join()
    assert trained == [12]
    assert [signal.getsignal(n) for n in HANDLED] == handlers


@pytest.mark.parametrize(
    ("after", "settings"), [(6, {}), (12, {}), (8, {"max_steps": 8, "max_epochs": None})]
)
def test_a_validation_at_the_end_that_was_interrupted_is_run_again(
    tmp_path: Path, after: int, settings: dict[str, Any]
) -> None:
    """After a signal during the validation at the end of an epoch or the run,
    the run resumes with it and ends the same.
    """
    rounds: list[int] = []

    class Rounds(Callback):
        def on_validation_start(self, trainer: RunView, task: Any) -> None:
            rounds.append(trainer.global_step)

    begin(tmp_path / "whole", **settings)
    asked(tmp_path / "parts", Asked(after, "validation"), **settings)
    begin(tmp_path / "parts", Rounds(), **settings)
    assert rounds[:1] == [after]
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_what_signals_left_is_deleted_in_the_end(tmp_path: Path) -> None:
    """Checkpoints retained only for a resume are removed when the run is done."""
    arguments: dict[str, Any] = {"monitor": "val/loss", "save_last": False}
    begin(tmp_path / "whole", ModelCheckpoint(**arguments))
    for after in (2, 7, 8):
        asked(tmp_path / "parts", ModelCheckpoint(**arguments), Asked(after))
    begin(tmp_path / "parts", ModelCheckpoint(**arguments))
    there, wanted = (
        LocalStore(tmp_path / run / "checkpoints").names() for run in ("parts", "whole")
    )
    assert there == wanted
