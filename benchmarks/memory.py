"""Peak memory of a training on the CPU, beside a bare loop's: ResNet-50 with SGD, and an MLP with
Adam.

    python -m benchmarks.memory [--short] [--json FILE]

Each training (peers.py: what prints or writes is off) has a process of its own, with one thread,
one malloc arena and a fixed threshold for mmap, so freed memory returns to the system and threads
hold no pools of their own. A figure is the mean over two runs, as reported by Linux:

    peak      the most that was resident (VmHWM; ru_maxrss may be that of the parent)
    growth    that, less what was resident before the training: torch, the trainer's modules and the batch
    of bare   the peak through that of a bare loop in a process that has imported the same modules. An import costs its
              memory once, whatever the model; the question here is what a trainer holds on to while
              it trains.
"""

from __future__ import annotations

import importlib
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Findings, Table, Target, main
from benchmarks.processes import answer, environment, in_turns

BARE, OURS = "bare loop", "trainkit"
IMPORTS = {
    BARE: [],
    OURS: ["trainkit.trainer"],
    "pytorch-ignite": [
        "ignite.contrib.handlers",
        "ignite.engine",
        "ignite.handlers",
        "ignite.metrics",
    ],
    "Fabric": ["lightning.fabric"],
    "Accelerate": ["accelerate"],
    "Lightning": ["lightning", "lightning.pytorch.loggers"],
}
MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "262144",
}
MB = 1000.0  # in kB as /proc gives them


def resident_kb(which: str) -> int:
    """Return a line of this process' status: VmRSS now, VmHWM at most."""
    return int(re.findall(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


def resnet50(steps: int) -> Any:
    """Return the job of ResNet-50 on 16 images of 64 x 64."""
    import torch
    import torchvision

    from benchmarks.peers import Job, sgd

    batch = (torch.randn(16, 3, 64, 64), torch.randint(1000, (16,)))
    return Job(torchvision.models.resnet50, sgd, [batch] * steps)


def mlp(steps: int) -> Any:
    """Return the job of an MLP of 17 million parameters with Adam."""
    import torch
    from torch import nn

    from benchmarks.peers import Job

    def model() -> nn.Module:
        return nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.ReLU()))
        )

    batch = (torch.randn(64, 2048), torch.randint(2048, (64,)))
    return Job(model, lambda parameters: torch.optim.Adam(parameters, lr=1e-4), [batch] * steps)


WORKS: dict[str, Callable[[int], Any]] = {"ResNet-50, SGD": resnet50, "MLP, Adam": mlp}


def train(work: str, name: str, modules_of: str, steps: int, out: Path) -> None:
    """Train in this process; write the resident memory before, and its peak, in MB."""
    import torch._dynamo  # noqa: F401 - torch imports it with the first optimizer; here it counts as an import for all

    from benchmarks.peers import LOOPS, nothing_printed

    for module in IMPORTS[modules_of]:
        importlib.import_module(module)
    job = WORKS[work](steps)
    before = resident_kb("VmRSS")
    with nothing_printed():
        LOOPS[name](job)
    out.write_text(json.dumps([before / MB, resident_kb("VmHWM") / MB]))


def measure(short: bool) -> Findings:
    """Train with each, several processes at a time:
    that changes the time they take, and no memory.
    """
    from benchmarks.peers import missing

    runs, steps, works = (1, 1, list(WORKS)[-1:]) if short else (2, 3, list(WORKS))
    findings = Findings(missing={name: why for name, why in missing().items() if name in IMPORTS})
    findings.settings = {"threads": 1, "runs": runs, "steps": steps}
    names = [name for name in IMPORTS if name not in findings.missing]
    # the bare loop imports their modules
    beside = {name: name if name == OURS or not short else BARE for name in names}
    processes = {(name, name) for name in names} | {(BARE, other) for other in beside.values()}
    for work in works:

        def one(name: str, modules_of: str, work: str = work) -> list[float]:
            arguments = ("--train", work, name, modules_of, str(steps))
            taken: list[float] = answer("benchmarks.memory", *arguments, env=environment(**MALLOC))
            return taken

        seen = [
            in_turns({" ".join(pair): lambda pair=pair: one(*pair) for pair in processes}, 0)
            for _ in range(runs)
        ]

        def of(name: str, modules_of: str, seen: Any = seen) -> tuple[float, float]:
            """Return the medians of the peak and of the growth."""
            taken = [run[f"{name} {modules_of}"][0] for run in seen]
            return statistics.median(peak for _, peak in taken), statistics.median(
                peak - before for before, peak in taken
            )

        rows: list[list[Any]] = [
            [name, *of(name, name), of(name, name)[0] / of(BARE, beside[name])[0]] for name in names
        ]
        findings.tables.append(
            Table(f"{work}: peak memory, MB", ["", "peak", "growth", "of bare"], rows)
        )
        findings.targets.append(
            Target(
                f"{work}: peak memory, of a bare loop's", rows[names.index(OURS)][-1], 1.01, "times"
            )
        )
    return findings


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), Path(sys.argv[6]))
    else:
        main(measure)
