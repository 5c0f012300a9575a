"""News: what the answers to heartbeats say. Of all workers at once, since each looks at all: a job
of a thousand has hundreds of heartbeats a second. It does not change, so any thread may answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.extensions.elastic.job import Job


@dataclass(frozen=True)
class News:
    """What the answers to heartbeats say.

    Attributes:
        generation: the newest one.
        why: why all workers should join again; "" if they need not.
        own: why a worker should, whatever the others do, by its name.
        workers: the names of all.
        is_broken: whether the newest generation can do nothing together any more.
        dumps: the workers that are to write their stacks.
    """

    generation: int
    why: str
    own: Mapping[str, str]
    workers: frozenset[str]
    is_broken: bool
    dumps: frozenset[str]

    def reply(self, name: str) -> dict[str, Any]:
        """Return the answer to a worker's heartbeat."""
        why = self.own.get(name, self.why)
        if name not in self.workers:
            why = "the driver saw this worker end"
        return {
            "wanted": self.generation + 1 if why else self.generation,
            "dump": name in self.dumps,
            "why": why,
            "broken": self.is_broken,
        }


def news_of(job: Job) -> News:
    """Return the news of a job."""
    own = {w.name: w.unwanted for w in job.workers.values() if w.unwanted}
    if job.over is not None:
        why = f"the job is over: {job.over.why}"
        own = {}
    elif job.stop is not None or not (job.is_broken or job.can_grow):
        why = ""
    else:
        changes = "; ".join(text for text, _ in job.changes)
        why = changes or "the others form a new generation"
    dumps = frozenset(w.name for w in job.workers.values() if w.dump == "wanted")
    return News(
        job.generation,
        why,
        own,
        frozenset(job.workers),
        job.has_lost_members,
        dumps,
    )
