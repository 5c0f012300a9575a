"""Progress: lines without a terminal, a bar on a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from tests.helpers.threads import World
from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import StochasticWeightAveraging
from trainkit.callbacks.progress.displays import Bars, Lines
from trainkit.callbacks.progress.progress import ProgressBar, make_screen
from trainkit.console import console_of
from trainkit.trainer import Trainer


class Logs(Line):
    """Logs a value for the bar."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Log a value for the bar."""
        self.log("train/score", 0.25, prog_bar=True)
        return super().training_step(batch, batch_idx)


class Clock:
    """Replaces the module time: each call advances by a fixed number of seconds."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = 0.0, step_s

    def monotonic(self) -> float:
        """Return the time."""
        self.now += self.step_s
        return self.now


def test_each_epoch_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal each epoch prints a line with its values,
    its rate and its time, and no more.
    """
    quiet(tmp_path, max_epochs=2, enable_progress_bar=True).fit(Line(), loader(23), loader(4))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for epoch, line in enumerate(lines, 1):
        assert re.fullmatch(
            rf"epoch {epoch}/2  val/loss [\d.e-]+  [\d,]+ samples/s  \d+\.\d s", line
        )


def test_a_long_epoch_is_seen_to_live(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal a line comes every half minute, with the values logged for the bar."""
    monkeypatch.setattr("trainkit.callbacks.progress.displays.time", Clock(step_s=16.0))
    quiet(tmp_path, max_steps=5, log_every_n_steps=1, enable_progress_bar=True).fit(
        Logs(), loader(23)
    )
    steps = [line for line in capsys.readouterr().out.splitlines() if "step" in line]
    assert [line.split("  ")[1] for line in steps] == ["step 2/5", "step 4/5"]
    assert all("train/score 0.25" in line for line in steps)


def test_a_stop_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stopped run prints the reason at its end."""

    class Stops(Line):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.request_stop("Enough.")

    quiet(tmp_path, enable_progress_bar=True).fit(Stops(), loader(23))
    assert capsys.readouterr().out.endswith("Stopped: Enough.\n")


class Screen(io.StringIO):
    """A terminal's stream."""

    def isatty(self) -> bool:
        """Return true."""
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal of 150 columns, and everything written to it."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=150, _environ={"TERM": "xterm"})
    monkeypatch.setattr("trainkit.callbacks.progress.progress.console_of", lambda: console)
    monkeypatch.setattr("trainkit.callbacks.progress.displays._REDRAW_S", 0.0)
    return screen


def plain(screen: io.StringIO) -> str:
    """Return the written text without colours and cursor moves."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())


@pytest.mark.parametrize("fails", [False, True])
def test_the_bar_is_taken_away(tmp_path: Path, terminal: io.StringIO, fails: bool) -> None:
    """On a terminal a bar counts the steps, and disappears when the run ends, well or not."""

    class Fails(Logs):
        def on_train_epoch_end(self) -> None:
            if fails:
                raise KeyError("broken")

    trainer = quiet(tmp_path, enable_progress_bar=True, log_every_n_steps=1)
    try:
        trainer.fit(Fails(), loader(23), loader(4))
    except KeyError:
        assert fails
    (bar,) = [c for c in trainer.callbacks if isinstance(c, ProgressBar)]
    assert bar._screen is None
    assert "epoch 1/1" in terminal.getvalue()
    # the cursor is back
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1


def test_epochs_are_a_table_on_a_terminal(tmp_path: Path, terminal: io.StringIO) -> None:
    """Its header is printed once; each epoch is a row under the names."""
    quiet(tmp_path, max_epochs=3, enable_progress_bar=True).fit(Line(), loader(23), loader(4))
    lines = [line.rstrip() for line in plain(terminal).splitlines()]
    heads = [line for line in lines if line.endswith("time") and "val/loss" in line]
    rows = [
        line
        for line in lines
        if re.match(r" *epoch \d/3 +[\d.e-]+ +[\d,]+ samples/s +[\d.]+ s$", line)
    ]
    assert len(heads) == 1 and len(rows) == 3
    assert (
        heads[0].index("val/loss") + len("val/loss")
        == re.search(r"3 +[\d.e-]+(?= )", rows[-1]).end()
    )  # type: ignore[union-attr]


def test_a_table_that_is_too_wide_is_turned(terminal: io.StringIO) -> None:
    """Forty values of an epoch are printed one per line."""
    bars = Bars(Console(file=terminal, force_terminal=True, width=60), 4.0)
    bars.epoch("epoch 1", {f"val/{i}": float(i) for i in range(40)}, "5 samples/s", 1.0)
    bars.close()
    assert (
        sum(bool(re.match(r" *val/\d+ +\d+ *$", line)) for line in plain(terminal).splitlines())
        == 40
    )


def test_a_validation_has_a_bar_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epoch, validation and test show their totals, and each ends;
    the sanity check's two batches are not shown.
    """
    shown: list[str] = []

    class Listed:
        def begin(self, name: str, total: int | None, done: int = 0) -> None:
            shown.append(f"{name} of {total}")

        def moved(self, done: int, rate: str, values: Any) -> None:
            shown.append(str(done))

        def end(self) -> None:
            shown.append("end")

        def epoch(self, *_: Any) -> None: ...

        def close(self) -> None:
            shown.append("close")

    monkeypatch.setattr("trainkit.callbacks.progress.progress.make_screen", lambda *_: Listed())
    trainer = quiet(tmp_path, enable_progress_bar=True, num_sanity_val_steps=1)
    trainer.fit(Line(), loader(8, 4), loader(12, 4))
    assert shown == [
        "epoch 1/1  step of 2",
        "1",
        "2",
        "validating of 3",
        "1",
        "2",
        "3",
        "end",
        "end",
        "close",
    ]
    shown.clear()
    trainer.validate(Line(), loader(12, 4))
    assert shown == ["validating of 3", "1", "2", "3", "end", "close"]


class OfMine(ProgressBar):
    """Shows other values, as a user's subclass of Lightning's bar does."""

    def get_metrics(self, trainer: Any, task: Any) -> dict[str, Any]:
        """Leave one out, and add two."""
        items = super().get_metrics(trainer, task)
        items.pop("v_num", None)
        return {**items, "queue": 7, "lr": 0.125}


def test_a_subclass_chooses_the_values_beside_the_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`get_metrics` is asked at each step; a number is short, another object its text."""
    screen = MagicMock()
    monkeypatch.setattr("trainkit.callbacks.progress.progress.make_screen", lambda *_: screen)
    trainer = quiet(
        tmp_path, callbacks=[OfMine()], enable_progress_bar=True, log_every_n_steps=1, max_steps=2
    )
    trainer.fit(Logs(), loader(8))
    shown = [call.args[2] for call in screen.moved.call_args_list]
    assert shown[-1] == ["train/score 0.25", "queue 7", "lr 0.125"]


def test_values_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`metrics` selects the values, also for an epoch."""
    bar = ProgressBar(metrics=["train/score"])
    trainer = quiet(tmp_path, callbacks=[bar], enable_progress_bar=True, log_every_n_steps=1)
    trainer.fit(Logs(), loader(23), loader(4))
    assert [c for c in trainer.callbacks if isinstance(c, ProgressBar)] == [bar], (
        "no second one is added"
    )
    assert bar.get_metrics(trainer, Logs()) == {"train/score": 0.25}
    assert "val/loss" not in capsys.readouterr().out


def test_a_value_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A value of steps and epochs is one column, though callback_metrics has it under two names."""

    class Both(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            """Log a value of the step, whose mean is the epoch's."""
            self.log("train/score", 0.25, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    trainer = quiet(tmp_path, enable_progress_bar=True)
    trainer.fit(Both(), loader(23))
    assert (
        trainer.callback_metrics["train/score_epoch"]
        == trainer.callback_metrics["train/score"]
        == 0.25
    )
    assert re.match(r"epoch 1/1  train/score 0.25  [\d,]+ samples/s", capsys.readouterr().out)


def test_a_validation_within_an_epoch_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A validation within an epoch is printed once, also if the run ends within that epoch."""
    quiet(tmp_path, enable_progress_bar=True, val_check_interval=2, max_steps=5).fit(
        Line(), loader(23), loader(4)
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if "val/loss" in line]
    assert [re.split("  +", line)[1] for line in lines] == ["step 2", "step 4", "step 5"]


def test_the_bar_ends_where_the_run_does(tmp_path: Path, terminal: io.StringIO) -> None:
    """max_steps within an epoch limits the bar."""
    quiet(tmp_path, enable_progress_bar=True, max_steps=2, log_every_n_steps=1).fit(
        Line(), loader(23)
    )
    assert "2/2" in plain(terminal) and "/6" not in plain(terminal)


def test_other_ranks_show_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two ranks only one prints."""
    settings: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_model_summary"), False
    )
    settings["run_dir"] = str(tmp_path)
    World(2).run(
        lambda engine: Trainer(engine=engine, max_epochs=1, **settings).fit(Line(), loader(8, 2))
    )
    assert capsys.readouterr().out.count("epoch 1/1") == 1


def test_a_notebook_without_widgets_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich's bars need ipywidgets there; with them they live."""
    console = Console(force_jupyter=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert isinstance(make_screen(console, 4.0), Lines)


def test_a_pipe_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under horovodrun output is a pipe, and a dumb terminal cannot move its cursor."""
    assert isinstance(make_screen(Console(file=io.StringIO()), 4.0), Lines)
    dumb = Console(force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(make_screen(dumb, 4.0), Lines)


def test_no_color_is_a_table_without_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal of 60 columns its rows fit, and no code moves the cursor."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout", screen := Screen())
    lines = make_screen(console_of(), 4.0)
    assert isinstance(lines, Lines)
    for epoch in ("epoch 1/2", "epoch 2/2"):
        lines.epoch(epoch, {"val/loss": 0.1}, "1,000 samples/s", 1.0)
    shown = [line.split() for line in screen.getvalue().splitlines()]
    assert [words[0] for words in shown] == ["val/loss", "epoch", "epoch"]
    assert max(map(len, screen.getvalue().splitlines())) <= 60
    assert "\x1b" not in screen.getvalue()


def test_no_bar_means_none(tmp_path: Path) -> None:
    """enable_progress_bar=False removes a bar from the config."""
    trainer = quiet(tmp_path, callbacks=[ProgressBar()], enable_progress_bar=False)
    assert not any(isinstance(c, ProgressBar) for c in trainer.callbacks)


def test_a_finished_epoch_may_be_gone_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that resumes at the last step of an epoch shows nothing for it, and does not fail."""
    quiet(tmp_path, max_steps=5, enable_checkpointing=True).fit(Line(), loader(23))
    quiet(tmp_path, max_steps=6, enable_progress_bar=True).fit(Line(), loader(23), ckpt_path="last")
    assert capsys.readouterr().out.startswith("epoch 1")


def test_no_epoch_comes_after_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SWA validates its average when training is over: that is no step of another epoch."""
    swa = StochasticWeightAveraging(0.05, swa_epoch_start=0)
    quiet(tmp_path, max_epochs=2, callbacks=swa, enable_progress_bar=True).fit(
        Line(), loader(8), loader(5)
    )
    shown = capsys.readouterr()
    assert "2/2" in shown.out + shown.err
    assert "3/2" not in shown.out + shown.err


def test_a_task_on_text_shows_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rate is in tokens if the Task knows how many a sample has."""

    class Text(Line):
        tokens_per_sample = 12.5

    quiet(tmp_path, max_epochs=1, enable_progress_bar=True).fit(Text(), loader(23))
    assert re.search(r"  [\d,]+ tokens/s  ", capsys.readouterr().out)
