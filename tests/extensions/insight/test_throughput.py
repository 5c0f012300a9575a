"""ThroughputMonitor: rates, shares, and the device's utilization, without changing the run."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.by_hand import Pair
from tests.helpers.logger_calls import Written
from tests.helpers.toy import Line, Net, loader, quiet
from trainkit.api.callback import Callback
from trainkit.callbacks import ThroughputMonitor
from trainkit.errors import ConfigError, TaskError
from trainkit.extensions.insight.peak_flops import peak_flops_of
from trainkit.extensions.insight.throughput import percentiles


def run(
    tmp_path: Path, task: Any, monitor: ThroughputMonitor, *more: Callback, **settings: Any
) -> Written:
    """Train 20 samples in steps of 4; return the logged values."""
    written = Written("throughput/")
    settings = {"log_every_n_steps": 2} | settings
    quiet(tmp_path, callbacks=[monitor, written, *more], **settings).fit(task, loader(20))
    return written


def test_all_is_written_at_the_log_steps(tmp_path: Path) -> None:
    """The first step is left out, and unknown values (MFU on a CPU) are not logged."""
    written = run(tmp_path, Line(), ThroughputMonitor(length_fn=lambda batch: 7 * len(batch[0])))
    names = [
        "samples_per_s",
        "items_per_s",
        *(f"step_ms_{end}" for end in ("p50", "p90", "p99", "max")),
    ]
    names += ["data_share", "communication_share", "tflops"]
    assert [(step, list(values)) for step, values in written.rows] == [
        (s, [f"throughput/{n}" for n in names]) for s in (2, 4)
    ]
    for _, values in written.rows:
        assert values["throughput/items_per_s"] == pytest.approx(
            7 * values["throughput/samples_per_s"]
        )
        assert (
            values["throughput/step_ms_p50"]
            <= values["throughput/step_ms_p99"]
            <= values["throughput/step_ms_max"]
        )
        assert 0 < values["throughput/data_share"] < 1


class Sleepless(Callback):
    """Moves the monitor's clock: half a second a step, an hour a validation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(
            "trainkit.extensions.insight.throughput.time",
            SimpleNamespace(perf_counter=lambda: self.now),
        )

    def on_train_step_start(self, trainer: Any, task: Any) -> None:
        """Advance the time."""
        self.now += 0.5

    def on_validation_batch_end(self, trainer: Any, task: Any, *_: Any) -> None:
        """Advance the time."""
        self.now += 3600


def test_rates_are_of_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples by time, validations left out; a function may count samples otherwise."""
    clock, written = Sleepless(monkeypatch), Written("throughput/")
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: 3 * len(batch[0]))
    trainer = quiet(
        tmp_path, callbacks=[clock, monitor, written], log_every_n_steps=1, val_check_interval=1
    )
    trainer.fit(Line(), loader(20), loader(4))
    assert written.of("throughput/samples_per_s") == [pytest.approx(24.0)] * 4


def test_the_window_slides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps before the window do not count."""
    clock = Sleepless(monkeypatch)

    class Slow(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            clock.now += 10.0 if batch_idx == 1 else 0.0

    monitor = ThroughputMonitor(window_size=2)
    written = run(tmp_path, Slow(), monitor, clock, log_every_n_steps=1)
    rates = [pytest.approx(4 / 10.5), pytest.approx(8 / 11), pytest.approx(8.0), pytest.approx(8.0)]
    assert written.of("throughput/samples_per_s") == rates


def test_flops_are_those_of_forward_and_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of 3 x 1 takes 2 x 3 FLOPs per sample forward, and as many for its weights;
    its inputs need no gradient.
    """
    clock, counted = Sleepless(monkeypatch), []

    class Counter(FlopCounterMode):
        def __enter__(self) -> Any:
            counted.append(self)
            return super().__enter__()

    monkeypatch.setattr("torch.utils.flop_counter.FlopCounterMode", Counter)
    written = run(
        tmp_path, Line(), ThroughputMonitor(peak_flops=1000.0), clock, accumulate_grad_batches=2
    )
    assert len(counted) == 1  # it slows a microbatch down
    assert written.of("throughput/tflops") == [pytest.approx(12 * 16 / 1e12)]
    assert written.of("throughput/mfu") == [pytest.approx(12 * 16 / 1000)]


def test_counted_flops_are_of_trainkits_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `batch_size_fn` that counts tokens changes the rate, and not the FLOPs of a second."""
    clock = Sleepless(monkeypatch)
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: 1000 * len(batch[0]))
    written = run(tmp_path, Line(), monitor, clock)
    assert written.of("throughput/samples_per_s")[-1] == pytest.approx(8000.0)
    assert written.of("throughput/tflops")[-1] == pytest.approx(12 * 8 / 1e12)


def test_percentiles_by_hand_are_of_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates a batch are one step of the clock."""
    lengths: list[int] = []
    monkeypatch.setattr(
        "trainkit.extensions.insight.throughput.percentiles",
        lambda durations: lengths.append(len(durations)) or {},
    )
    run(tmp_path, Pair(), ThroughputMonitor(window_size=2), log_every_n_steps=1)
    assert lengths == [1, 2, 2, 2]


def test_given_flops_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flops_per_sample replaces counting, also under compile, which cannot be counted."""
    clock = Sleepless(monkeypatch)
    written = run(tmp_path, Line(), ThroughputMonitor(flops_per_sample=5e12), clock)
    assert written.of("throughput/tflops") == [pytest.approx(40.0)] * 2


def test_what_cannot_be_counted_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under compile a message names the missing setting, and no value is invented."""
    # it takes half a minute
    monkeypatch.setattr(
        "trainkit.run.compile.compiled", lambda task, mode, in_blocks: contextlib.nullcontext()
    )
    written = run(tmp_path, Line(), ThroughputMonitor(peak_flops=1.0), compile=True)
    assert (
        "FLOPs cannot be counted under trainer.compile. Give callbacks.throughput.flops_per_sample."
        in capsys.readouterr().out
    )
    assert written.of("throughput/mfu") == [] and written.of("throughput/samples_per_s")


class Ends(Callback):
    """Records the state after each step's backward and update."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        """Record gradients, buffers and random states."""
        tensors = [p.grad.clone() for p in task.parameters()] + [b.clone() for b in task.buffers()]
        self.kept.append([*tensors, torch.get_rng_state()])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_counting_changes_nothing(tmp_path: Path, precision: Any) -> None:
    """Gradients, batch norm's statistics and random states of each step
    equal those of a run without it, bit for bit.
    """
    watched, plain = Ends(), Ends()
    run(
        tmp_path / "a",
        Net(),
        ThroughputMonitor(),
        watched,
        precision=precision,
        assert_no_sync=True,
    )
    quiet(tmp_path / "b", callbacks=[plain], precision=precision).fit(Net(), loader(20))
    assert len(watched.kept) == len(plain.kept) == 5
    for one, other in zip(watched.kept, plain.kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_counting_ends_with_a_failed_step(tmp_path: Path) -> None:
    """Counting stops if the first step raises."""

    class Fails(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("the test says so")

    with pytest.raises(RuntimeError, match="the test says so"):
        run(tmp_path, Fails(), ThroughputMonitor(), assert_no_sync=True)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_count_must_be_a_number_of_the_host(tmp_path: Path) -> None:
    """A tensor is refused: reading it would wait for the device in each step."""
    with pytest.raises(
        TaskError,
        match=(
            r"callbacks\.throughput\.length_fn returned tensor\(3\) \(Tensor\); it must be an int"
        ),
    ):
        run(tmp_path, Line(), ThroughputMonitor(length_fn=lambda batch: torch.tensor(3)))  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match=r"callbacks\.throughput\.window_size is 0"):
        ThroughputMonitor(window_size=0)


def test_percentiles_are_those_of_the_steps() -> None:
    """Percentiles are in ms, from seconds; without durations there are none."""
    found = percentiles([i / 1000 for i in range(1, 101)])
    assert found == pytest.approx(
        {"step_ms_p50": 50.5, "step_ms_p90": 90.1, "step_ms_p99": 99.01, "step_ms_max": 100.0}
    )
    assert percentiles([]) == {}


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", False, 312),
        ("NVIDIA A100-SXM4-80GB", "32-true", True, 156),
        ("NVIDIA A100-SXM4-80GB", "32-true", False, 19.5),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16-mixed", False, None),
        ("NVIDIA H100 80GB HBM3", "16-mixed", False, 989.4),
        ("NVIDIA H100 PCIe", "bf16-true", False, 756.5),
        ("NVIDIA H100 NVL", "bf16-true", False, 835.5),
        ("NVIDIA H200", "64-true", False, 66.9),
        ("NVIDIA B200", "bf16-mixed", False, 2250),
        ("NVIDIA A10", "bf16-mixed", False, 125),
        ("NVIDIA A10G", "bf16-mixed", False, None),
        ("NVIDIA GB200", "bf16-mixed", False, 2500),
        ("NVIDIA L4", "bf16-mixed", False, 121),
        ("NVIDIA L40S", "bf16-mixed", False, 362),
        ("Tesla T4", "32-true", True, 8.1),
        ("Tesla V100-SXM2-16GB", "16-mixed", False, 125),
        ("NVIDIA GeForce RTX 4090", "bf16-mixed", False, 165.2),
        ("NVIDIA GeForce RTX 4090 D", "bf16-mixed", False, None),
        ("NVIDIA L4", "64-true", False, None),
        ("Some GPU", "bf16-mixed", False, None),
    ],
)
def test_the_table_knows_devices_by_name(
    name: str, precision: Any, tf32: bool, tera: float | None
) -> None:
    """A name that only resembles a known one has no figure."""
    assert peak_flops_of(name, precision, tf32) == (
        None if tera is None else pytest.approx(tera * 1e12)
    )


def test_convolutions_are_measured_against_tf32() -> None:
    """torch rounds theirs by default, where it leaves matrices as they are; a MFU above 1 is none."""
    before = torch.backends.cudnn.conv.fp32_precision
    peak = functools.partial(peak_flops_of, "NVIDIA A100-SXM4-80GB", "32-true")
    assert (peak(), peak(convolves=True)) == (19.5e12, 156e12)
    try:
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        assert peak(convolves=True) == 19.5e12
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


@pytest.mark.parametrize(
    "line",
    [
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'tf32'",
        "torch.set_float32_matmul_precision('high')",
    ],
)
def test_tf32_is_seen_however_it_was_set(line: str) -> None:
    """In a new process, where no setting was made:
    torch refuses to read one of these settings after another was set.
    """
    program = f"""
import torch
from trainkit.extensions.insight.peak_flops import peak_flops_of
before = peak_flops_of("NVIDIA H200", "32-true")
{line}
print(before, peak_flops_of("NVIDIA H200", "32-true"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        str(peak_flops_of("NVIDIA H200", "32-true", tf32)) for tf32 in (False, True)
    ]
