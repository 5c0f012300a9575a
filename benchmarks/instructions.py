"""Instructions of a training step, counted by valgrind's callgrind: repeatable, whatever else the
machine does.

One process runs all contenders under callgrind, which counts between two calls of a contender's
loss alone, in the thread that trains: a thread that wakes once a second would do so at every other
step here, where a second has some thirty of them. What a step costs beside the contender's own code
(the interpreter, torch, its libraries) is in it, the kernel's work is not.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.peers import LOOPS, LOOPS_ALL_ON, Job, nothing_printed, sgd, tiny_batches, tiny_mlp

WARM, COUNTED = 20, 100


def why_not() -> str:
    """Return why nothing can be counted here, or ""."""
    return "" if shutil.which("callgrind_control") else "valgrind is not installed"


def count(names: Sequence[str], seed: int = 0) -> dict[str, float]:
    """Return the instructions of a step of each contender.

    Args:
        seed: of the hashes of texts, which are else drawn for each process.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "valgrind",
            "--tool=callgrind",
            "--instr-atstart=no",
            "--separate-threads=yes",
            f"--callgrind-out-file={folder}/counted",
        ]
        run = subprocess.run(
            [*command, sys.executable, "-m", __spec__.name, *names],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
        )
        if run.returncode:
            raise RuntimeError(run.stderr[-2000:])
        by_name = {}
        for part in Path(folder).glob("counted.*"):
            text = part.read_text()
            number = re.search(r"^desc: Trigger: dump contender(\d+)$", text, re.MULTILINE)
            total = re.search(r"^totals: (\d+)", text, re.MULTILINE)
            trains = re.search(r"^thread: 1$", text, re.MULTILINE)
            if number and total and trains:
                by_name[names[int(number[1])]] = int(total[1]) / COUNTED
    if set(by_name) != set(names):
        raise RuntimeError(f"callgrind dumped nothing of {', '.join(set(names) - set(by_name))}")
    return by_name


class Counted:
    """A loss that has callgrind count from one call to another, and dump the sum under a number."""

    def __init__(self, number: int) -> None:
        self._number, self._calls = number, 0

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy."""
        if self._calls == WARM:
            # a full collection costs as much as 10,000 instructions in each of these steps, and
            # comes or does not come within them
            gc.collect()
            gc.disable()
            self._control("-i", "on")
        elif self._calls == WARM + COUNTED:
            # a number alone would be taken for a process
            self._control("-d", f"contender{self._number}")
            self._control("-i", "off")
            gc.enable()
        self._calls += 1
        return nn.functional.cross_entropy(outputs, labels)

    def _control(self, *what: str) -> None:
        subprocess.run(
            ["callgrind_control", *what, str(os.getpid())], check=True, stdout=subprocess.DEVNULL
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for i, contender in enumerate(sys.argv[1:]):
        with nothing_printed():
            (LOOPS | LOOPS_ALL_ON)[contender](
                Job(tiny_mlp, sgd, tiny_batches(WARM + COUNTED + 2), Counted(i))
            )
