"""Contenders that need a process of their own each: for start-up and for memory, which a process can show only once."""

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
    """Return what a contender's process sees: so many threads, and bytecode kept on disk, as Python does by default."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return own | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)} | more


def answer(module: str, *arguments: str, env: Mapping[str, str], ranks: int = 0) -> Any:
    """Run `python -m module *arguments FILE` quietly, under horovodrun where `ranks` are given; return FILE's JSON.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "answer.json")
        launch = ["-m", "horovod.runner.launch", "--gloo", "-np", str(ranks), sys.executable] if ranks else []
        command = [sys.executable, *launch, "-m", module, *arguments, str(out)]
        done = subprocess.run(command, env=dict(env), capture_output=True, text=True, check=False, timeout=600)
        if done.returncode or not out.exists():
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return json.loads(out.read_text())


def in_turns(
    contenders: Mapping[str, Callable[[], Sequence[float]]], rounds: int, at_once: int | None = None
) -> dict[str, list[list[float]]]:
    """Return what `take_turns` returns; with no rounds let each contender run once, to see that it does.

    Args:
        contenders: name -> runs once and returns its samples.
        rounds: how often each counts.
        at_once: how many run at a time where there are no rounds: for processes of their own, as many as there are cores.
    """
    if rounds:
        return take_turns(contenders, rounds)
    with ThreadPoolExecutor(at_once or len(os.sched_getaffinity(0))) as pool:
        taken = pool.map(lambda contender: [list(contender())], contenders.values())
        return dict(zip(contenders, taken, strict=True))
