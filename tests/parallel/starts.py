"""Workers under real launchers: each start runs once, when its results are first read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launching import run_command

ROOT = Path(__file__).parents[2]
WORKERS = Path(__file__).parent / "workers"
Results = dict[str, list[dict[str, Any]]]  # scenario -> its result on each rank


def line_of(launcher: str, ranks: int, worker: str) -> str:
    """Return the command line that starts a worker: "single", "horovod" or "ddp"."""
    script = WORKERS / worker
    return {
        "single": f"python {script}",
        "horovod": f"horovodrun --gloo -np {ranks} python {script}",
        "ddp": f"torchrun --nproc-per-node {ranks} {script}",
    }[launcher]


class Starts(dict[Any, Results]):
    """The result of every scenario of a worker, by the name of a start.

    Args:
        line: returns a start's command line; {out} is replaced by the file of results.
        folders: makes a folder for each start.
        timeout_s: time limit of a start.

    Attributes:
        output: what a start printed, once it has run.
        folders: of a start, once it has run.
    """

    def __init__(
        self, line: Callable[[Any], str], folders: pytest.TempPathFactory, timeout_s: float = 180
    ) -> None:
        super().__init__()
        self._line, self._new_folder, self._timeout_s = line, folders.mktemp, timeout_s
        self.output: dict[Any, str] = {}
        self.folders: dict[Any, Path] = {}

    def __missing__(self, start: Any) -> Results:
        folder = self.folders[start] = self._new_folder("start")
        line = self._line(start).format(out=folder / "out.pt")
        others = filter(None, [os.environ.get("PYTHONPATH")])
        done = run_command(
            line,
            folder,
            timeout_s=self._timeout_s,
            PYTHONPATH=os.pathsep.join([str(ROOT), *others]),
        )
        assert done.code == 0, done.text
        self.output[start] = done.text
        self[start] = torch.load(folder / "out.pt", weights_only=False)
        return self[start]
