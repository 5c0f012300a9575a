"""Training on one GPU: whether it is right, images/s of ResNet-50 and ViT-B/16 at 224 x 224 and
tokens/s of GPT-2, trainkit beside a loop by hand of the same settings.

    python -m benchmarks.gpu [--json FILE] [--seconds 1500]    what `make bench-gpu` runs
    python -m benchmarks.gpu --device cpu --short              see that it runs: tiny models, the figures mean nothing

Settings: gpu_training.py. Data: noise on the device, and generated JPEGs. trainkit and the loop by
hand take turns block by block in one process; a figure is the median over blocks. Further: host
syncs a step, peak memory, the kernels that take longest, overlap of gradients' sums with backward
(gpu_sums.py), with torch.compile and with CUDA graphs (mode="reduce-overhead"), what checkpoints and
loaders add (gpu_costs.py), and weights that must be equal (gpu_checks.py). The most important parts
come first; a part without time left is named, one that takes three times as long as it should is
ended, and the JSON is written after each part.

Ceilings: of arithmetic (MFU is the share of it) and of bytes, from a product of matrices and a copy
that are measured here. An image's cost is computed: 24.3 and 105.2 GFLOP; of ResNet-50 9,176
images/s by bytes at 4.3 TB/s where each operator reads and writes its own, 12,670 where batch norm,
sum and ReLU are one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch

from benchmarks import gpu_checks, gpu_costs, gpu_sums
from benchmarks.data import Arrivals, seconds_of_image
from benchmarks.gpu_profile import Profile, Profiled, Window, copy_bytes, matmul_flops
from benchmarks.gpu_training import (
    GPT,
    RESNET,
    TINY,
    TINY_GPT,
    VIT,
    ByHand,
    Fit,
    Model,
    forget,
    in_blocks,
)
from benchmarks.harness import Findings, Table, Target, main, median, median_ratio
from benchmarks.jpegs import CLASSES, make_jpegs
from recipes.imagefolder import ImageFolder

RECORD = 7983  # images/s of a GPU: MLPerf v4.0, 8 x H200, MXNet on Horovod
# ResNet-50's images/s by bytes, at so many bytes/s
EAGER_BYTES, FUSED_BYTES, BYTES_PER_S = 9176, 12670, 4.3e12
GRAPHS = "reduce-overhead"
GRACE_S = 20.0  # for the part in progress when the time is over


@contextlib.contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the context lasts longer."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(
            f"it was ended after {seconds:.0f} s, when the time for all parts was over"
        )

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Bench:
    """The parts, and their findings.

    Args:
        device: the device.
        short: whether it is the short form.
        out: file for the JSON, written after each part.
        seconds: time limit for all parts.
    """

    def __init__(self, device: torch.device, short: bool, out: Path | None, seconds: float) -> None:
        self.device = device
        self.short = short
        self.out = out
        self.ends = time.perf_counter() + seconds
        self.models = TINY if device.type == "cpu" else (RESNET, VIT)
        self.text = TINY_GPT if device.type == "cpu" else GPT
        self.findings = Findings()
        self.rates = Table(
            "images/s",
            [
                "model",
                "compile",
                "by hand",
                "trainkit",
                "of by hand",
                "MFU %",
                "of bytes %",
                "of fused bytes %",
                "of 7,983 %",
            ],
            [],
        )
        self.steps = Table(
            "what a step does",
            ["model", "", "host syncs", "kernels", "peak GB", "kernels that take longest"],
            [],
        )
        self.sums = Table(
            "sums at one rank",
            ["", "images/s", "of by hand", "beside, ms a step", "overlapped %"],
            [],
        )
        self.tokens = Table(
            "tokens/s",
            ["precision", "compile", "by hand, bf16", "trainkit", "of by hand", "MFU %", "peak GB"],
            [],
        )
        self.checks = Table("weights on the GPU", ["", "beside", "largest difference", "error"], [])
        self.units = Table("unit tests on the GPU", ["", "passed", "failed", "which"], [])
        self.costs = Table("ms a step", ["", "ms", "peak GB", "error"], [])
        self.jpegs = Table("JPEGs from disk", ["", "images/s", "of by hand"], [])
        self.ceilings = Table("ceilings", ["", "per second"], [])
        self.findings.tables = [
            self.checks,
            self.rates,
            self.tokens,
            self.jpegs,
            self.costs,
            self.steps,
            self.sums,
            self.ceilings,
            self.units,
        ]
        self.flops = self.bytes = 0.0
        self.findings.settings |= {
            "torch": torch.__version__,
            "device": self._device_name(),
            "seconds": seconds,
        }

    def run(self) -> Findings:
        """Run the parts, as far as there is time."""
        resnet, vit = self.models
        parts: list[tuple[str, float, Callable[[], None]]] = [
            ("ceilings", 5, self.measure_ceilings),
            ("a resumed run", 10, self.check_resumed),
            ("two ranks on one GPU", 60, self.check_two_ranks),
            *((f"{m.name}, eager", 40, partial(self.measure_rate, m, None)) for m in (resnet, vit)),
            *((f"{m.name}, profile", 25, partial(self.measure_step, m)) for m in (resnet, vit)),
            (f"{self.text.name}, eager", 40, partial(self.measure_tokens, None)),
            ("two modules under CUDA graphs, compile", 60, self.check_compiled_pair),
            ("costs", 60, self.measure_costs),
            ("JPEGs", 100, self.measure_jpegs),
            ("sums, DDP", 30, self.measure_ddp),
            ("sums, Horovod", 30, self.measure_horovod),
            ("sums, Horovod, async completion", 30, self.measure_async_horovod),
            (
                "sums, Horovod, bf16-true",
                30,
                partial(self.measure_horovod, "horovod, bf16-true", precision="bf16-true"),
            ),
            (
                "sums, Horovod, powersgd",
                30,
                partial(self.measure_horovod, "horovod, powersgd of rank 4", rank=4),
            ),
            (f"{self.text.name}, compile", 120, partial(self.measure_tokens, "default")),
            (
                f"{self.text.name}, fp8-mixed, compile",
                120,
                partial(self.measure_tokens, "default", "fp8-mixed"),
            ),
        ]
        for mode in ("default", GRAPHS):
            wait = 120 if mode == "default" else 90
            parts += [
                (f"{m.name}, compile={mode}", wait, partial(self.measure_rate, m, mode))
                for m in (resnet, vit)
            ]
        parts.append(("unit tests", 360, self.run_units))
        for name, takes, part in parts:
            if self.short and "compile" in name:
                self.findings.missing[name] = "not in the short form: compiling takes a minute"
            elif time.perf_counter() + (0 if self.short else takes) > self.ends:
                self.findings.missing[name] = f"it takes about {takes:.0f} s, which were not left"
            else:
                self.attempt(name, part, takes)
        if self.rates.rows:
            self.aim()
        return self.findings

    def attempt(self, name: str, part: Callable[[], None], takes: float = math.inf) -> None:
        """Run a part; an exception costs only that part, and so does a part that takes three times
        as long as it should. Then write the findings so far.
        """
        before = time.perf_counter()
        limit = min(self.ends - before + GRACE_S, math.inf if self.short else 3 * takes)
        try:
            with ended_after(limit):
                part()
        except Exception as error:  # a GPU is dear: the other parts' figures are not to be lost
            self.findings.missing[name] = (
                f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            )
        self.findings.settings[f"seconds of {name}"] = round(time.perf_counter() - before, 1)
        forget(self.device)
        if self.out is not None:
            self.out.write_text(json.dumps(self.findings.as_json(), indent=1) + "\n")

    def measure_ceilings(self) -> None:
        """Measure the device's peak FLOP/s and bytes/s."""
        on_gpu = self.device.type == "cuda"
        self.flops = matmul_flops(self.device, 8192 if on_gpu else 128)
        self.bytes = copy_bytes(self.device, 2**32 if on_gpu else 2**20)
        self.ceilings.rows += [
            ["TFLOP, bf16 matrices", self.flops / 1e12],
            ["TB, copied", self.bytes / 1e12],
        ]

    def measure_rate(self, model: Model, mode: str | None) -> None:
        """Measure images/s of noise on the device."""
        ours, hand = in_blocks(model, self.device, mode)
        rate = model.batch / median(ours)
        shares: list[Any] = [
            100 * rate * model.flop / self.flops if self.flops else None,
            None,
            None,
            None,
        ]
        if model is self.models[0] and self.bytes:
            by_bytes = self.bytes / BYTES_PER_S
            shares[1:] = [
                100 * rate / (limit * by_bytes) for limit in (EAGER_BYTES, FUSED_BYTES)
            ] + [100 * rate / RECORD]
        self.rates.rows.append(
            [
                model.name,
                mode or "no",
                model.batch / median(hand),
                rate,
                1 / median_ratio(ours, hand),
                *shares,
            ]
        )

    def measure_step(self, model: Model) -> None:
        """Profile five steps of each, and assert that none of
        trainkit's reads anything off the device.
        """
        batch, first = model.images(self.device), 4
        hand = ByHand(model, self.device, None)
        hand.seconds(batch, first)
        window = Window(self.device)
        for _ in range(5):
            hand.step(*batch)
        peak = self._add_step(model, "by hand", window.end(5))
        del hand
        forget(self.device)
        profiled = Profiled(first, first + 5)
        Fit(model, self.device)([batch] * (first + 6), [profiled])
        assert profiled.profile is not None
        own_peak = self._add_step(model, "trainkit", profiled.profile)
        # a SyncError would say which
        Fit(model, self.device, settings={"assert_no_sync": True})([batch] * 4)
        self.findings.targets.append(
            Target(
                f"{model.name}: host syncs a step",
                profiled.profile.waits / profiled.profile.steps,
                0,
                "calls",
            )
        )
        if peak and own_peak:
            self.findings.targets.append(
                Target(
                    f"{model.name}: peak memory, of the loop by hand",
                    own_peak / peak,
                    1.01,
                    "times",
                )
            )

    def _add_step(self, model: Model, name: str, profile: Profile) -> float | None:
        peak = (
            torch.cuda.max_memory_allocated(self.device) / 1e9
            if self.device.type == "cuda"
            else None
        )
        longest = ", ".join(
            f"{kernel} {100 * share:.0f} %" for kernel, share in profile.dominant(8)
        )
        waits, launches = profile.waits / profile.steps, profile.launches / profile.steps
        self.steps.rows.append([model.name, name, waits, launches, peak, longest])
        return peak

    def check_resumed(self) -> None:
        """Compare a resumed run with one that never ended."""
        apart = gpu_checks.resumed(self.device)
        self.checks.rows.append(["resumed in an epoch, with dropout", "a whole run", apart, ""])
        self.findings.targets.append(Target("a resumed run, beside a whole one", apart, 0, "apart"))

    def check_two_ranks(self) -> None:
        """Compare two ranks of ddp, which share the GPU, with one process."""
        for name, apart, error in gpu_checks.two_ranks(self.device):
            self.checks.rows.append(
                [f"two ranks, ddp over gloo: {name}", "one process", apart, error]
            )

    def check_compiled_pair(self) -> None:
        """Compare two modules under CUDA graphs with eager ones."""
        apart = gpu_checks.compiled_pair(self.device)
        name = "two modules, compile=reduce-overhead, accumulation"
        self.checks.rows.append([name, "eager", apart, ""])

    def run_units(self) -> None:
        """Run the unit tests, which take the GPU; in the short form those of one file."""
        folders = ("optim/test_clipping.py",) if self.short else gpu_checks.UNITS
        seconds = max(10.0, self.ends - time.perf_counter())
        self.units.rows.append(["tests/unit", *gpu_checks.unit_tests(seconds, folders)])

    def measure_costs(self) -> None:
        """Measure a step with checkpoints, capsules and loaders, and a batch norm in its ways."""
        steps, workers = (6, 0) if self.short else (60, 4)
        self.costs.rows += gpu_costs.costs(self.models[0], self.device, steps, workers)
        shape = (4, 8, 16, 16) if self.short else (256, 256, 56, 56)
        self.costs.rows += gpu_costs.norms(self.device, shape, steps)

    def measure_tokens(self, mode: str | None, precision: str = "bf16-mixed") -> None:
        """Measure tokens/s of GPT-2."""
        model = self.text
        ours, hand = in_blocks(model, self.device, mode, precision)
        tokens = model.batch * model.image
        rate = tokens / median(ours)
        ratio = 1 / median_ratio(ours, hand)
        mfu = 100 * rate * model.flop / self.flops if self.flops else None
        on_gpu = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) / 1e9 if on_gpu else None
        self.tokens.rows.append(
            [precision, mode or "no", tokens / median(hand), rate, ratio, mfu, peak]
        )
        if precision == "bf16-mixed":
            what = f"{model.name}, compile={mode or 'no'}: tokens/s, of the loop by hand"
            self.findings.targets.append(Target(what, ratio, 1.0, "times", "at least"))

    def measure_jpegs(self) -> None:
        """Train ResNet-50 on JPEGs, in turn, with the same data set and loader."""
        model = self.models[0]
        workers = 2 if self.short else self._workers_with_room(model)
        different, links = (16, 2) if self.device.type == "cpu" else (512, 60)
        with tempfile.TemporaryDirectory() as folder:
            make_jpegs(Path(folder), different, links)
            taken: dict[str, list[list[float]]] = {"by hand": [], "trainkit": []}
            both = [("by hand", self._by_hand_on_files), ("trainkit", self._trainkit_on_files)]
            for turn in [both] if self.short else [both, both[::-1]]:
                for name, train in turn:
                    times = train(ImageFolder(folder, model.batch, CLASSES, model.image, workers))
                    taken[name].append(
                        seconds_of_image(
                            times, model.batch, workers if len(times) > 4 * workers + 8 else 0
                        )
                    )
        for name, seconds in taken.items():
            self.jpegs.rows.append(
                [name, 1 / median(seconds), 1 / median_ratio(seconds, taken["by hand"])]
            )

    def _workers_with_room(self, model: Model) -> int:
        """Return a worker for each core,
        or as many as shared memory has room for with the batches that they hold.
        """
        cores, free = len(os.sched_getaffinity(0)), shutil.disk_usage("/dev/shm").free
        batch = 4 * 3 * model.batch * model.image**2
        workers = min(cores, free // (3 * batch))  # each has two ready and one in the making
        if not workers:
            raise RuntimeError(
                f"/dev/shm has {free / 1e6:.0f} MB free, and a worker needs {3 * batch / 1e6:.0f}"
                " (docker: --ipc=host)"
            )
        if workers < cores:
            self.findings.settings["JPEGs: workers, by /dev/shm's size"] = workers
        return workers

    def _by_hand_on_files(self, data: ImageFolder) -> list[float]:
        data.setup("fit")
        hand, times = ByHand(self.models[0], self.device, None), list[float]()
        for images, labels in data.train_dataloader():
            times.append(time.perf_counter())
            images = images.to(self.device, non_blocking=True).to(memory_format=torch.channels_last)
            hand.step(images, labels.to(self.device, non_blocking=True))
        return times

    def _trainkit_on_files(self, data: ImageFolder) -> list[float]:
        seen = Arrivals()
        Fit(self.models[0], self.device)(None, [seen], datamodule=data)
        return seen.times

    def measure_ddp(self) -> None:
        """Measure with torch.distributed."""
        turns, ours, hand = gpu_sums.with_ddp(self.models[0], self.device)
        self._add_sums("by hand, DDP", turns.hand, turns.hand, hand)
        self._add_sums("trainkit, ddp", turns.ours, turns.hand, ours)

    def measure_horovod(
        self, name: str = "horovod", rank: int | None = None, precision: str = "bf16-mixed"
    ) -> None:
        """Measure with Horovod, beside the loop by hand without sums
        (hvd.DistributedOptimizer refuses channels_last).

        Args:
            name: of the row.
            rank: of PowerSGD's factors. Their second message waits for the first in backward.
            precision: trainkit's; bf16-true gradients are cast, since Horovod sums no bfloat16.
        """
        import horovod.torch as hvd

        if self.device.type == "cuda" and not hvd.nccl_built():
            raise RuntimeError("this Horovod was built without NCCL")
        engine, model = gpu_sums.summing_horovod(rank), self.models[0]
        hand = ByHand(model, self.device, None)
        turns, profile = gpu_sums.run(model, self.device, engine, hand, precision)
        name = f"trainkit, {name} (by hand: no sums)"
        self._add_sums(name, turns.ours, turns.hand, profile)

    def measure_async_horovod(self) -> None:
        """Measure with HOROVOD_ENABLE_ASYNC_COMPLETION, which Horovod reads when it starts."""
        import horovod.torch as hvd

        if hvd.is_initialized():
            hvd.shutdown()
        with mock.patch.dict(os.environ, {"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}):
            self.measure_horovod("horovod with async completion")
        hvd.shutdown()

    def _add_sums(
        self, name: str, own: list[list[float]], hand: list[list[float]], profile: Profile
    ) -> None:
        beside = profile.beside_us / 1000 / profile.steps
        overlap = None if profile.overlap is None else 100 * profile.overlap
        rate = self.models[0].batch / median(own)
        self.sums.rows.append([name, rate, 1 / median_ratio(own, hand), beside, overlap])

    def aim(self) -> None:
        """Compare the findings with the targets."""
        for row in self.rates.rows:
            name, mode, ratio = row[0], row[1], float(row[4] or 0)
            self.findings.targets.append(
                Target(
                    f"{name}, compile={mode}: images/s, of the loop by hand",
                    ratio,
                    1.0,
                    "times",
                    "at least",
                )
            )
        if "H200" in self._device_name():
            best = max(
                (float(row[3] or 0) for row in self.rates.rows if row[0] == RESNET.name),
                default=0.0,
            )
            self.findings.targets.append(
                Target("ResNet-50 on an H200, the best", best, 5500, "images/s", "at least")
            )

    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"


def measure(short: bool, device: str, out: Path | None, seconds: float) -> Findings:
    """Run the parts; without a GPU, report that, unless the CPU was requested."""
    if device == "cuda" and not torch.cuda.is_available():
        return Findings(
            missing={"all": "there is no GPU here; --device cpu --short sees that the script runs"}
        )
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True  # for both
    if device == "cpu":
        torch.set_num_threads(1)  # the models are too small for more
    return Bench(
        torch.device(device, 0) if device == "cuda" else torch.device(device), short, out, seconds
    ).run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--json", type=Path)
    options, rest = parser.parse_known_args()
    sys.argv[1:] = [*rest, *(["--json", str(options.json)] if options.json else [])]
    main(partial(measure, device=options.device, out=options.json, seconds=options.seconds))
