"""Timeline: records the configured or requested steps, and changes nothing else."""

from __future__ import annotations

import gzip
import json
import os
import signal
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.late_device import late_device
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, loader, quiet
from trainkit.api.callback import Callback
from trainkit.api.view import RunView
from trainkit.callbacks import ModelCheckpoint, Timeline
from trainkit.extensions.timeline.recording import Recording
from trainkit.extensions.timeline.report.steps import analyse
from trainkit.extensions.timeline.traces.merge import read_recording, recordings
from trainkit.extensions.timeline.traces.pieces import (
    FOLDER,
    HOROVOD,
    OWN,
    REQUEST,
    TORCH,
    WHOLE,
    read_events,
)


def parts(folder: Path, rank: int = 0) -> dict[int, list[str]]:
    """Return the names of the parts of each step, in order."""
    names: dict[int, list[str]] = {}
    for event in read_events(folder / OWN.format(rank)):
        if event.get("cat") == "part" and "samples" not in event["args"]:
            names.setdefault(event["args"]["step"], []).append(event["name"])
    return names


def test_the_steps_that_were_asked_for_are_recorded(tmp_path: Path) -> None:
    """Each step has its parts in order;
    the merged file is strict JSON and contains torch's operators too.
    """
    timeline = Timeline(start_step=2, num_steps=3)
    quiet(tmp_path, callbacks=[timeline], max_epochs=2).fit(Line(), loader(23), loader(4))
    (folder,) = recordings(tmp_path)
    assert folder.name == "steps-2-4" and timeline.folders == [folder]
    of_steps = parts(folder)
    assert sorted(of_steps) == [2, 3, 4]
    for names in of_steps.values():
        order = [name for name in names if name not in ("hooks", "validation")]
        assert order[:3] == ["data", "forward", "backward"] and order[-1] == "optimizer"
    events = json.loads(gzip.decompress((folder / WHOLE).read_bytes()))["traceEvents"]
    assert {"aten::addmm", "backward", "step 3"} <= {event["name"] for event in events}


def test_a_step_is_its_parts(tmp_path: Path) -> None:
    """Parts follow each other without a gap, and microbatches are separate."""
    quiet(
        tmp_path, callbacks=[Timeline(0, 2, torch_profiler=False)], accumulate_grad_batches=2
    ).fit(Line(), loader(16))
    (folder,) = recordings(tmp_path)
    assert [name for name in parts(folder)[0] if name == "backward"] == ["backward", "backward"]
    events = [e for e in read_events(folder / OWN.format(0)) if e.get("cat") == "part"]
    for step in (0, 1):
        (whole,) = [e for e in events if e["name"] == f"step {step}"]
        own = [e for e in events if e["args"]["step"] == step and e is not whole]
        assert sum(e["dur"] for e in own) == pytest.approx(whole["dur"], abs=0.01)
    assert not (folder / TORCH.format(0)).exists()


def test_a_validation_is_no_part_of_a_step(tmp_path: Path) -> None:
    """A validation within a step and one between two are separate parts,
    which the analysis leaves out.
    """

    class Slow(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            torch.linalg.svd(torch.randn(300, 300))

    quiet(tmp_path, callbacks=[Timeline(0, 4, torch_profiler=False)], val_check_interval=1).fit(
        Slow(), loader(16), loader(4)
    )
    (folder,) = recordings(tmp_path)
    assert all("validation" in names for names in parts(folder).values())
    events = [
        e
        for e in read_events(folder / OWN.format(0))
        if e.get("cat") == "part" and "samples" not in e["args"]
    ]
    for step in analyse(read_recording(folder)).steps:
        others = [
            e["dur"] for e in events if e["args"]["step"] == step.step and e["name"] != "validation"
        ]
        assert 0 < step.total_s <= sum(others) / 1e6 + 1e-6


def test_recording_changes_nothing(tmp_path: Path) -> None:
    """The weights are equal to the bit."""
    plain, recorded = Line(), Line()
    quiet(tmp_path / "a", max_epochs=2).fit(plain, loader(23))
    quiet(tmp_path / "b", max_epochs=2, callbacks=[Timeline(1, 3)]).fit(recorded, loader(23))
    for name, value in plain.state_dict().items():
        assert torch.equal(value, recorded.state_dict()[name])


class At(Callback):
    """Runs a function after a step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_train_step_end(self, trainer: RunView, task: Any) -> None:
        """Run it."""
        if trainer.global_step == self.step:
            self.act(trainer)


def ask(trainer: RunView) -> None:
    """Do the same as `trainkit timeline RUN_DIR record=2`."""
    (trainer.run_dir / FOLDER).mkdir(exist_ok=True)
    (trainer.run_dir / FOLDER / REQUEST).write_text("2")


def test_what_an_earlier_start_recorded_is_made_one_file_too(tmp_path: Path) -> None:
    """An aborted run, or an elastic one with changed ranks,
    leaves recordings that are not merged.
    """

    def fail(trainer: RunView) -> None:
        raise KeyError("broken")

    saves = ModelCheckpoint(every_n_train_steps=2, every_n_epochs=1)
    with pytest.raises(KeyError):
        quiet(tmp_path, callbacks=[Timeline(1, 2), saves, At(5, fail)]).fit(Line(), loader(23))
    (folder,) = recordings(tmp_path)
    assert not (folder / WHOLE).exists()
    quiet(tmp_path, callbacks=[Timeline(None), ModelCheckpoint()]).fit(
        Line(), loader(23), ckpt_path="last"
    )
    assert (folder / WHOLE).exists()


@pytest.mark.parametrize(
    "act", [ask, lambda trainer: os.kill(os.getpid(), signal.SIGUSR2)], ids=["asked", "signalled"]
)
def test_a_running_job_records_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Any
) -> None:
    """By a file in its folder, or by a signal: recording starts at the next step."""
    monkeypatch.setattr("trainkit.extensions.timeline.callback._LOOK_EVERY_S", 0.0)
    before = signal.getsignal(signal.SIGUSR2)
    timeline = Timeline(start_step=None, num_steps=2, torch_profiler=False)
    quiet(tmp_path, callbacks=[timeline, At(3, act)], max_epochs=2).fit(Line(), loader(23))
    (folder,) = recordings(tmp_path)
    assert sorted(parts(folder)) == [3, 4]
    assert not (tmp_path / FOLDER / REQUEST).exists()
    assert signal.getsignal(signal.SIGUSR2) == before


def test_a_run_that_ends_early_ends_the_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recording is complete; a run that ends before it reports that."""
    quiet(tmp_path / "a", callbacks=[Timeline(4, 50)]).fit(Line(), loader(23))
    (folder,) = recordings(tmp_path / "a")
    assert sorted(parts(folder)) == [4, 5] and (folder / WHOLE).exists()
    quiet(tmp_path / "b", callbacks=[Timeline(20)]).fit(Line(), loader(23))
    assert "start_step is 20, and training ended at step 6" in capsys.readouterr().out


def test_an_error_leaves_what_was_recorded(tmp_path: Path) -> None:
    """The files are closed, the profiler is stopped, and the next fit can record."""

    def fail(trainer: RunView) -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError):
        quiet(tmp_path, callbacks=[Timeline(1, 5), At(3, fail)]).fit(Line(), loader(23))
    (folder,) = recordings(tmp_path)
    assert sorted(parts(folder)) == [1] and json.loads((folder / OWN.format(0)).read_text())
    assert not torch.autograd._profiler_enabled()


def test_a_full_disk_costs_the_recording_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported once, and training continues."""

    def full(self: Any, events: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainkit.extensions.timeline.traces.pieces.TraceFile.add", full)
    trainer = quiet(tmp_path, callbacks=[Timeline(1, 3, torch_profiler=False)])
    trainer.fit(Line(), loader(23))
    assert trainer.global_step == 6
    assert capsys.readouterr().out.count("No space left on device") == 1


def test_all_ranks_record_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank writes its own file; the request goes to one of them."""
    monkeypatch.setattr("trainkit.extensions.timeline.callback._LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("trainkit.engine.coordinator.INTERVAL_S", 0.0)

    def work(engine: ThreadEngine) -> int:
        act = At(2, ask if engine.ranks.rank == 0 else lambda trainer: None)
        settings: dict[str, Any] = {
            "callbacks": [Timeline(None, 2, torch_profiler=False), act],
            "max_steps": 40,
        }
        trainer = quiet(tmp_path, engine=engine, log_every_n_steps=1, **settings)
        trainer.fit(Line(), loader(23, 2))
        return trainer.global_step

    assert World(2).run(work) == [40, 40]
    (folder,) = recordings(tmp_path)
    both = [sorted(parts(folder, rank)) for rank in (0, 1)]
    assert both[0] == both[1] and len(both[0]) == 2


def test_outside_of_a_recording_nothing_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside a recording a step pays one comparison."""
    monkeypatch.setattr(Recording, "mark", lambda *_: pytest.fail("no rank records"))
    quiet(tmp_path, callbacks=[Timeline(start_step=None)]).fit(Line(), loader(23))
    assert recordings(tmp_path) == [] and not (tmp_path / FOLDER / HOROVOD.format(0)).exists()


@pytest.mark.parametrize("seed", [None, 0])
def test_a_recording_reads_events_that_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    """On a device whose work runs late: the end of the recording waits, once; no step does."""
    monkeypatch.setattr(
        "trainkit.extensions.timeline.recording._computes_on_gpu", lambda trainer: True
    )
    monkeypatch.setattr("trainkit.extensions.timeline.recording.name_of", lambda device: "late")
    with late_device(seed):
        quiet(tmp_path, callbacks=[Timeline(1, 3, torch_profiler=False)]).fit(Line(), loader(23))
    (folder,) = recordings(tmp_path)
    parts = [e for e in read_events(folder / OWN.format(0)) if e.get("cat") == "part"]
    steps = [e["args"]["step"] for e in parts if e["tid"] == 1 and e["name"] == "backward"]
    assert steps == [1, 2, 3]


class Device:
    """Replaces a GPU: work queued by the host is done ten times later, in order."""

    def __init__(self) -> None:
        self.zero = self.handed = time.perf_counter()
        self.done = 0.0

    def event(self, timed: bool) -> Event:
        """Record an event after all queued work."""
        now = time.perf_counter()
        self.done += 10 * (now - self.handed)
        self.handed = now
        return Event(self.done)


@dataclass
class Event:
    """Replaces torch.Event."""

    at: float

    def synchronize(self) -> None:
        """Return True: it has completed."""

    def elapsed_time(self, later: Event) -> float:
        """Return milliseconds."""
        return 1000 * (later.at - self.at)


def test_on_a_gpu_the_devices_own_times_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are recorded in addition to the host's, which runs ahead;
    the analysis uses the device's.
    """
    device = Device()
    monkeypatch.setattr(
        "trainkit.extensions.timeline.recording._computes_on_gpu", lambda trainer: True
    )
    monkeypatch.setattr("trainkit.extensions.timeline.recording.mark", device.event)
    monkeypatch.setattr("torch.accelerator.synchronize", lambda: None)
    monkeypatch.setattr("trainkit.extensions.timeline.recording.name_of", lambda device: "H200")
    quiet(tmp_path, callbacks=[Timeline(1, 3, torch_profiler=False)]).fit(Line(), loader(23))
    (folder,) = recordings(tmp_path)
    events = [
        e
        for e in read_events(folder / OWN.format(0))
        if e.get("cat") == "part" and "samples" not in e["args"]
    ]
    host, gpu = (
        [e for e in events if e["tid"] == tid and e["name"] == "backward"] for tid in (0, 1)
    )
    assert [e["args"]["step"] for e in host] == [e["args"]["step"] for e in gpu] == [1, 2, 3]
    assert all(
        g["dur"] == pytest.approx(10 * h["dur"], rel=0.5) for h, g in zip(host, gpu, strict=True)
    )
    analysis = analyse(read_recording(folder))
    assert analysis.median("backward") == pytest.approx(
        statistics.median(e["dur"] for e in gpu) / 1e6
    )
    assert analysis.abouts[0].device == "H200"
