"""Contenders that need a process of their own each:
for start-up and for memory, which a process can show only once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness import take_turns

ROOT = Path(__file__).parents[1]


def environment(threads: int = 1, **more: str) -> dict[str, str]:
    """Return the environment of a contender's process:
    the number of threads, and bytecode on disk, as is Python's default.
    """
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return own | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)} | more


def answer(
    module: str, *arguments: str, env: Mapping[str, str], ranks: int = 0, torchrun: bool = False
) -> Any:
    """Run `python -m module *arguments FILE` quietly, under horovodrun or torchrun if `ranks` are
    given; return FILE's JSON.

    Raises:
        RuntimeError: it failed; with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "answer.json")
        horovodrun = ["-m", "horovod.runner.launch", "--gloo", "-np", str(ranks), sys.executable]
        own = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        launch = [] if not ranks else own if torchrun else horovodrun
        command = [sys.executable, *launch, "-m", module, *arguments, str(out)]
        done = subprocess.run(
            command, env=dict(env), capture_output=True, text=True, check=False, timeout=600
        )
        if done.returncode or not out.exists():
            raise RuntimeError(
                f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return json.loads(out.read_text())


def in_turns(
    contenders: Mapping[str, Callable[[], Sequence[float]]], rounds: int, at_once: int | None = None
) -> dict[str, list[list[float]]]:
    """Return the result of `take_turns`; with no rounds run each contender once, as a smoke test.

    Args:
        contenders: name -> runs once and returns its samples.
        rounds: number of counted runs of each.
        at_once: contenders that run at a time if there are no rounds: for processes of their own,
            the number of cores.
    """
    if rounds:
        return take_turns(contenders, rounds)
    with ThreadPoolExecutor(at_once or len(os.sched_getaffinity(0))) as pool:
        taken = pool.map(lambda contender: [list(contender())], contenders.values())
        return dict(zip(contenders, taken, strict=True))
