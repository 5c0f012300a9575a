"""Starts fits with launcher=ray on the tests' cluster, disturbs them, and reads the journals of their ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ray.conftest import ROOT

CONF = """
task: {_target_: journal_task.Journalled, pause_s: 0.05, fails_at: null}
trainer: {max_epochs: 4, global_batch_size: 12, enable_progress_bar: false}
callbacks: {elastic: {_target_: trainkit.callbacks.Elastic, commit_every_n_steps: 1}}
logger: {}
"""
SAMPLES = 61


@dataclass
class Started:
    """A job that was started in a folder; `process` is the driver."""

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def text(self) -> str:
        """What the driver has printed."""
        return (self.folder / "log").read_text()

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of all ranks' journals, by time; a line that is being written is left out."""
        found = []
        for path in self.folder.glob("journal-*"):
            found += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return sorted(found, key=lambda line: line["t"])

    def wait_for_step(self, step: int, ranks: int = 2) -> list[dict[str, Any]]:
        """Wait until a step is trained on so many ranks; return the journals' lines."""
        wait_for(
            lambda: any(line["step"] >= step and line["ranks"] == ranks for line in self.lines()[-2:]),
            f"step {step} on {ranks} ranks",
            self,
        )
        return self.lines()

    def pids(self) -> dict[int, int]:
        """Return the process ids by rank, of the newest lines."""
        return {line["rank"]: line["pid"] for line in self.lines()}

    def hurry(self) -> None:
        """Let the ranks train without pauses from now on."""
        (self.folder / "hurry").touch()

    def sizes(self) -> list[int]:
        """Return the number of ranks of each generation that trained, in order."""
        return [ranks for _, ranks in sorted({line["generation"]: line["ranks"] for line in self.lines()}.items())]

    def end(self, timeout_s: float = 90) -> int:
        """Wait for the end; return the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {timeout_s} s:\n{self.text[-3000:]}") from None

    def ends(self) -> list[dict[str, Any]]:
        """Return what the ranks that came to the end wrote."""
        return [json.loads(path.read_text()) for path in self.folder.glob("end-*")]


def wait_for(condition: Callable[[], bool], what: str, job: Started | None = None, timeout_s: float = 60) -> None:
    """Poll a condition; fail if it does not hold in time, or if the job has ended."""
    end = time.monotonic() + timeout_s
    while not condition():
        text = "" if job is None else job.text[-3000:]
        assert time.monotonic() < end, f"{what} did not happen within {timeout_s} s\n{text}"
        assert job is None or job.process.poll() is None, f"the job ended before {what}\n{text}"
        time.sleep(0.02)


def write_project(folder: Path) -> None:
    """Write a user's project: a conf, and the module of its Task."""
    (folder / "conf").mkdir(parents=True, exist_ok=True)
    (folder / "conf" / "journal.yaml").write_text("defaults: [_base, _self_]\n" + CONF)
    (folder / "journal_task.py").write_text((Path(__file__).parent / "journal_task.py").read_text())


@contextlib.contextmanager
def started(folder: Path, *words: str, command: str = "", **environment: str) -> Iterator[Started]:
    """Start a fit in a folder, or another command; nothing of it is left at the end."""
    write_project(folder)
    line = [sys.executable, *["-m", "trainkit", "fit", "conf=journal", "launcher=ray", "run_dir=run"]]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "PYTEST_"))}
    env |= {"PYTHONPATH": str(ROOT), "JOURNAL": str(folder), "OMP_NUM_THREADS": "1"} | environment
    env |= {"TRAINKIT_JOURNAL": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*(command.split() or line), *words], cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield Started(folder, process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def check_samples(job: Started, epochs: int = 4, repeated: int = 0) -> None:
    """Each epoch holds each sample once, in the steps as they were trained last; the ranks end alike; no step is lost.

    Args:
        epochs: of the job.
        repeated: how many samples at most were trained twice: those of the steps that a loss has cut.
    """
    steps: dict[tuple[int, int], dict[int, list[int]]] = {}
    lines = job.lines()
    for line in lines:
        generations = steps.setdefault((line["epoch"], line["step"]), {})
        generations.setdefault(line["generation"], []).extend(line["ids"])
    for epoch in range(epochs):
        ids = [i for (of, _), parts in steps.items() if of == epoch for i in parts[max(parts)]]
        assert sorted(ids) == list(range(SAMPLES)), f"epoch {epoch}\n{job.text}"
    ends = job.ends()
    assert ends and all(end == ends[0] for end in ends), f"the ranks' last weights differ\n{job.text}"
    again = sum(len(ids) for parts in steps.values() for generation, ids in parts.items() if generation != max(parts))
    assert again <= repeated, f"{again} samples were repeated\n{job.text}"
