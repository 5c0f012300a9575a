"""Jobs with ranks that write down which samples they train:
a user's project, and what its ranks have written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLES = 61
_CONF = """
defaults: [_base, _self_]
task: {_target_: journal_task.Journalled, pause_s: 0.05, fails_at: null}
trainer: {max_epochs: 4, global_batch_size: 12, enable_progress_bar: false}
logger: {}
"""


@dataclass
class Journal:
    """The journals of a job's ranks in a folder."""

    folder: Path

    @property
    def text(self) -> str:
        """What the job has printed."""
        return (self.folder / "log").read_text()

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of all ranks' journals, by time;
        a line that is being written is left out.
        """
        found = []
        for path in self.folder.glob("journal-*"):
            found += [
                json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")
            ]
        return sorted(found, key=lambda line: line["t"])

    def has_step(self, step: int, ranks: int = 2) -> bool:
        """Return whether a step, or a later one, is trained on so many ranks."""
        return any(line["step"] >= step and line["ranks"] == ranks for line in self.lines()[-2:])

    def pids(self) -> dict[int, int]:
        """Return the process ids by rank, of the newest lines."""
        return {line["rank"]: line["pid"] for line in self.lines()}

    def hurry(self) -> None:
        """Let the ranks train without pauses from now on."""
        (self.folder / "hurry").touch()

    def sizes(self) -> list[int]:
        """Return the number of ranks of each generation that trained, in order."""
        return [
            ranks
            for _, ranks in sorted(
                {line["generation"]: line["ranks"] for line in self.lines()}.items()
            )
        ]

    def ends(self) -> list[dict[str, Any]]:
        """Return what the ranks that came to the end wrote."""
        return [json.loads(path.read_text()) for path in self.folder.glob("end-*")]


def write_project(folder: Path, more: str = "") -> None:
    """Write a user's project: a conf, with `more` lines, and the module of its Task."""
    (folder / "conf").mkdir(parents=True, exist_ok=True)
    (folder / "conf" / "journal.yaml").write_text(_CONF.lstrip() + more)
    (folder / "journal_task.py").write_text((Path(__file__).parent / "journal_task.py").read_text())


def wait_until(condition: Callable[[], bool], timeout_s: float, failure: Callable[[], str]) -> None:
    """Poll a condition; fail if it does not hold in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s: {failure()}"
        time.sleep(0.02)


def check_samples(job: Journal, epochs: int = 4, repeated: int = 0) -> None:
    """Each epoch holds each sample once, in the steps as they were trained last; the ranks end
    alike; no step is lost.

    Args:
        job: that has ended.
        epochs: of the job.
        repeated: how many samples at most were trained twice: those of the steps that a loss has
            cut.
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
    assert ends and all(end == ends[0] for end in ends), (
        f"the ranks' last weights differ\n{job.text}"
    )
    again = sum(
        len(ids)
        for parts in steps.values()
        for generation, ids in parts.items()
        if generation != max(parts)
    )
    assert again <= repeated, f"{again} samples were repeated\n{job.text}"
