"""trainer.profiler: a table of the time spent, and a trace."""

from __future__ import annotations

import gzip
import json
import pstats
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, Net, loader, quiet, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import AdvancedProfiler, PyTorchProfiler, SimpleProfiler, Timeline
from trainkit.errors import ConfigError
from trainkit.extensions.profilers import callbacks as profiler_module
from trainkit.extensions.profilers.callbacks import STEP


class Clock:
    """A clock that only Busy moves."""

    now_s = 0.0

    def perf_counter(self) -> float:
        """Return its time, in seconds."""
        return self.now_s


class Busy(Callback):
    """A slow hook."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(
        self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take 5 ms of the clock."""
        self.clock.now_s += 0.005

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        """Take time within a part of the step."""
        self.clock.now_s += 0.005


class Slow(Callback):
    """A hook that is among the slowest functions."""

    def on_train_batch_end(
        self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take 5 ms."""
        time.sleep(0.005)


class Everything(Line):
    """A task of all entry points, with a hook at each batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0]

    def on_validation_batch_end(self, *batch: Any) -> None:
        """Do nothing."""

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


class Hooked(Line):
    """A task with its own hook."""

    def on_train_epoch_end(self) -> None:
        """Do nothing."""


def test_hooks_and_parts_of_a_step_are_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each hook's calls and time are counted,
    separately from the part of the step in which it runs.
    """
    monkeypatch.setattr(profiler_module, "time", clock := Clock())
    profiler = SimpleProfiler()
    quiet(tmp_path, callbacks=[Busy(clock)], profiler=profiler, max_epochs=2).fit(
        Hooked(), loader(16)
    )
    calls, seconds = profiler.seconds["Busy", "on_train_batch_end"]
    assert calls == 8
    assert seconds == pytest.approx(8 * 0.005)
    assert profiler.seconds["Hooked", "on_train_epoch_end"][0] == 2
    assert {name: profiler.seconds["step", name][0] for name in STEP} == dict.fromkeys(STEP, 8)
    assert sum(profiler.seconds["step", name][1] for name in STEP) == pytest.approx(0)
    text = (tmp_path / "reports" / "profile-simple.txt").read_text()
    for row in ("Busy", "on_train_batch_end", "training_step", "optimizer.step"):
        assert row in text and row in capsys.readouterr().out + text
    assert max(map(len, text.splitlines())) <= 120


def test_the_table_is_there_after_an_error_too(tmp_path: Path) -> None:
    """A failed run prints the table too."""

    class Fails(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise RuntimeError("the test says so")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="the test says so"):
        quiet(tmp_path, profiler="simple").fit(Fails(), loader(16))
    assert "backward" in (tmp_path / "reports" / "profile-simple.txt").read_text()


class EndsEarly(Net):
    """Ends each epoch by its hook."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Return -1 at the third batch."""
        return -1 if batch_idx == 2 else None


@pytest.mark.parametrize("profiler", ["simple", "advanced", "pytorch"])
@pytest.mark.parametrize("task", [Net, EndsEarly])
def test_a_profiled_run_is_the_same_run(tmp_path: Path, profiler: Any, task: Any) -> None:
    """A profiled run is bit-identical, also if a hook's result ends an epoch."""
    looked, plain = task(), task()
    trainer = quiet(tmp_path / "a", profiler=profiler, max_epochs=4)
    trainer.fit(looked, loader(16))
    quiet(tmp_path / "b", max_epochs=4).fit(plain, loader(16))
    assert torch.equal(weights(looked), weights(plain))
    assert trainer.global_step == (16 if task is Net else 8)


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_an_evaluation_is_profiled_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], entry: str
) -> None:
    """Each profiler names its report after the entry point; a fit's own stays as it is."""
    profilers = ("simple", "advanced", PyTorchProfiler(wait=1, warmup=1, active=2))
    for profiler in profilers:
        trainer = quiet(tmp_path, profiler=profiler)
        getattr(trainer, entry)(Everything(), loader(23))
    reports = {path.name for path in (tmp_path / "reports").iterdir()}
    names = {f"profile-{name}-{entry}.txt" for name in ("simple", "advanced", "pytorch")}
    assert reports == names | {f"profile-advanced-{entry}.prof"}
    batch_end = {"validate": "validation"}.get(entry, entry)
    assert (
        f"on_{batch_end}_batch_end"
        in (tmp_path / f"reports/profile-simple-{entry}.txt").read_text()
    )
    assert (tmp_path / f"profiler/{entry}-rank-0.json.gz").is_file()
    assert "profile of 2 batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SimpleProfiler(dirpath="x"), "profiler.dirpath: Leave it out: files are in"),
        (lambda: SimpleProfiler("x", "y"), "Its arguments: none"),
        (lambda: AdvancedProfiler(line_count_restriction=2), "In its place: row_limit"),
        (lambda: PyTorchProfiler(export_to_chrome=False), "a trace of each rank"),
    ],
)
def test_lightnings_arguments_are_explained(make: Any, said: str) -> None:
    """The classes have its names, and files places of their own."""
    with pytest.raises(ConfigError, match=said):
        make()


def test_torchs_profiler_writes_a_trace_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace holds the active steps, the table the operators."""
    quiet(tmp_path, profiler=PyTorchProfiler(wait=1, warmup=1, active=2)).fit(Net(), loader(23))
    events = json.loads(gzip.decompress((tmp_path / "profiler" / "rank-0.json.gz").read_bytes()))[
        "traceEvents"
    ]
    steps = {
        event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep")
    }
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}
    assert "aten::addmm" in (tmp_path / "reports" / "profile-pytorch.txt").read_text()
    assert "profile of 2 steps" in capsys.readouterr().out


def test_a_run_that_is_too_short_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a recorded step there is no table, which is reported."""
    quiet(tmp_path, profiler="pytorch", max_steps=2).fit(Net(), loader(23))
    assert "the run ended before step 8" in capsys.readouterr().out


def test_an_unknown_profiler_is_refused(tmp_path: Path) -> None:
    """Only the known names, or a callback, are accepted."""
    with pytest.raises(
        ConfigError,
        match=r"profiler is 'simpel'; it must be one of 'simple', 'advanced', 'pytorch' or null",
    ):
        quiet(tmp_path, profiler="simpel")


def test_of_several_ranks_the_first_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other callbacks end as without the profiler."""

    def work(engine: ThreadEngine) -> int:
        trainer = quiet(tmp_path, engine=engine, profiler="simple")
        trainer.fit(Line(), loader(16, 2))
        return trainer.global_step

    assert World(2).run(work) == [4, 4]
    assert capsys.readouterr().out.count("time of the main thread") == 1


@pytest.mark.parametrize("first", [0, 3])
def test_two_that_use_torchs_profiler_do_not_meet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: int
) -> None:
    """Only one profiler may run (a second one may end the process):
    Timeline records without it, and reports that.
    """
    trainer = quiet(
        tmp_path, max_epochs=3, profiler=PyTorchProfiler(2, 1, 9), callbacks=[Timeline(first, 6)]
    )
    trainer.fit(Line(), loader(23))
    assert trainer.global_step == 18
    assert "trainer.profiler=pytorch uses torch's profiler" in capsys.readouterr().out
    assert not list(tmp_path.rglob("torch-*")) and list(tmp_path.rglob("profiler/rank-0.json.gz"))


def test_a_profiler_of_the_users_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A running profiler of the user continues."""
    with torch.profiler.profile(acc_events=False) as own:
        quiet(tmp_path, callbacks=[Timeline(1, 2)]).fit(Line(), loader(23))
    assert "is already running and cannot run twice" in capsys.readouterr().out
    assert any(event.key == "aten::addmm" for event in own.key_averages())


def test_advanced_profiles_each_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """profiler="advanced" writes cProfile's table and file, after an error too,
    and ends with the fit.
    """
    quiet(tmp_path / "a", callbacks=[Slow()], profiler="advanced").fit(Hooked(), loader(16))
    reports = tmp_path / "a" / "reports"
    text = (reports / "profile-advanced.txt").read_text()
    assert "(training_step)" in text
    assert "(on_train_batch_end)" in text
    stats = pstats.Stats(str(reports / "profile-advanced.prof"))
    assert {name: calls for (_, _, name), (calls, *_) in stats.stats.items()}[
        "on_train_batch_end"
    ] == 4  # type: ignore[attr-defined]
    assert "profile of each function: " in capsys.readouterr().out

    class Fails(Slow):
        def on_train_end(self, trainer: Any, task: Any) -> None:
            raise ValueError("it fails")

    with pytest.raises(ValueError, match="it fails"):
        quiet(tmp_path / "b", callbacks=[Fails()], profiler="advanced").fit(Line(), loader(4))
    assert (tmp_path / "b" / "reports" / "profile-advanced.txt").is_file()
    assert sys.getprofile() is None
