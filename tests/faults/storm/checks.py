"""What must hold after a storm."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults.storm.job import SAMPLES, STEP
from tests.faults.storm.storm import JOB, ROOT, Storm, make_folder

TOLERANCE = 1e-12
# of each process's start, what comes before the callback's clock is not the ledger's
LEDGER_S = 1.0
_MOMENT_S = 5.0
EXPECTED = [
    "checkpoints",
    "checkpoints/*",
    "metrics.csv",
    "goodput.json",
    "progress.json",
    "logs",
    "logs/stacks-*.txt",
    ".lock",
]

# What a killed process cannot delete: multiprocessing's folder, and files that torch's DataLoader
# opens after an error, to see whether it may open more (_try_get_data). A folder of torch's
# compiler. One file of each user's, by which the ranks of a host agree on the one that reports an
# error.
TEMPORARY = ["pymp-*", "tmp????????", "torchinductor_*", "trainkit-*-reported"]


class Undisturbed:
    """The same fit to which nothing happens: one process, no launcher.
    Its weights after each epoch.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._weights: list[list[float]] = []

    def weights(self, epochs: int) -> list[float]:
        """Return the weights after so many epochs."""
        if len(self._weights) < epochs:
            folder = make_folder(self._folder)
            given = {"pace_s": 0.0, "epochs": epochs, "elastic": False, "engine": "single"}
            text = json.dumps(given)
            command = [sys.executable, str(JOB), str(folder / "run"), str(folder), text]
            environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            subprocess.run(command, env=environ, check=True, capture_output=True, timeout=900)
            (end,) = folder.glob("end-*.json")
            self._weights = json.loads(end.read_text())["by_epoch"]
        return self._weights[epochs - 1]


def broken(storm: Storm, undisturbed: Undisturbed) -> list[str]:
    """Return the promises that the ended job has broken."""
    return [
        *_samples(storm),
        *_weights(storm, undisturbed),
        *_processes(storm),
        *_files(storm),
        *_ledger(storm),
    ]


def _ends(storm: Storm) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(storm.notes.glob("end-*.json"))]


def _samples(storm: Storm) -> Iterator[str]:
    ends = _ends(storm)
    if not ends:
        yield "no rank came to the end"
    for end in ends:
        epochs = end["step"] * STEP / SAMPLES
        off = [i for i, count in enumerate(end["seen"]) if abs(count - epochs) > 1e-6]
        if off or end["uneven"]:
            yield (
                f"samples {off[:10]} do not count {epochs} times; a sample did not count once in"
                f" {end['uneven']} epochs"
            )


def _weights(storm: Storm, undisturbed: Undisturbed) -> Iterator[str]:
    for end in _ends(storm):
        expected = undisturbed.weights(end["step"] * STEP // SAMPLES)
        worst = max(abs(a - b) for a, b in zip(end["weights"], expected, strict=True))
        storm.say(
            f"    weights after {end['step']} steps: within {worst:.1e} of the undisturbed run's"
        )
        if not worst <= TOLERANCE:
            yield f"the weights are {worst:g} from the undisturbed run's"


def _processes(storm: Storm) -> Iterator[str]:
    end = time.monotonic() + _MOMENT_S
    while left := _left(storm):
        if time.monotonic() > end:
            yield f"processes are left: {left}"
            return
        time.sleep(0.05)


def _left(storm: Storm) -> list[int]:
    there = [pid for host in range(storm.hosts.count) for pid in storm.hosts.processes(host)]
    servers = {storm.hosts.server(host) for host in range(storm.hosts.count)}
    return sorted({*there, *storm.processes()} - servers)


def _files(storm: Storm) -> Iterator[str]:
    whole = {path.name for path in storm.checkpoints()}
    for path in storm.run_dir.rglob("*"):
        name = str(path.relative_to(storm.run_dir))
        parts = Path(name).parts
        if (
            parts[0] == "checkpoints"
            and len(parts) > 1
            and (parts[1] in whole or parts[1] in ("last", "best"))
        ):
            continue
        if not any(fnmatch.fnmatch(name, pattern) for pattern in EXPECTED) or (
            len(parts) == 2 and parts[0] == "checkpoints"
        ):
            yield f"a file is left in the run's folder: {name}"
    left = [path.name for path in storm.temporary.iterdir()]
    if left := [
        name for name in left if not any(fnmatch.fnmatch(name, pattern) for pattern in TEMPORARY)
    ]:
        yield f"{len(left)} files are left in the temporary folder: {left[:5]}"
    if len(whole) > 4 + len(storm.damaged):
        yield f"{len(whole)} checkpoints are left"


def _ledger(storm: Storm) -> Iterator[str]:
    kept = json.loads((storm.run_dir / "goodput.json").read_text())
    wall = kept["until"]["unix_s"] - float((storm.notes / "began").read_text())
    total = sum(kept["seconds"].values())
    storm.say(
        f"    goodput's ledger: {total:.2f} s of {wall:.2f} s; {kept['goodput']:.2f} of it steps"
        " that count"
    )
    if abs(total - wall) > LEDGER_S:
        yield (
            f"goodput's ledger adds up to {total:.2f} s, and the wall clock to {wall:.2f} s:"
            f" {kept['seconds']}"
        )
