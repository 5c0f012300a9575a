"""What a change of ranks costs: from the last step before it to the first after it, under
horovodrun (engine=horovod), `trainkit launch` (engine=ddp) and on Ray (engine=horovod).

    python -m benchmarks.recovery [--short] [--json FILE]

A job of one to two ranks (benchmarks/recovery_rank.py), a commit after each step; launchers take
turns. From outside, once a generation has trained for a while: a worker is killed; on Ray its
actor, and its node; a node drains (elsewhere: a host leaves the discovery script's list); a node
comes. All launchers continue with one rank, and grow again when the replacement is ready.

    pause       from the last step that a rank begins before the change to the first one after it, a step included
    longest     pause of all rounds; others are medians
    seen        from the moment at which the first rank that stays sees the change to that step
    whole       from the fault to the first step on two ranks again: a process's start, imports and set-up
    repeated    steps of which some rank trains its part twice

On Ray's side a node is a raylet of ray.cluster_utils on this host, so the network between nodes is
not in the figures.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Cell, Findings, Table, Target, absent, main
from benchmarks.processes import environment
from benchmarks.recovery_rank import BATCH, STEP_S
from trainkit.extensions.ray.connection import take_access

# the large one has 8.4 million parameters, 100 MB with Adam's state
WIDTHS = {"small": 64, "large": 2860}
ROUNDS = {"small": 2, "large": 2}
SETTLED, LIMIT_S = 12, 180.0  # steps of a generation before it is disturbed; for each change
FIT = (
    "from trainkit.launch.ray import RayLauncher; import sys; sys.exit(RayLauncher(num_workers=[1,"
    " 2], "
)
FIT += (
    "resources_per_worker={'CPU': 1, 'slot': 1}).run(['python', '-m', 'benchmarks.recovery_rank',"
    " *sys.argv[1:]]))"
)
# launchers that start their ranks themselves, as modules
DRIVERS = {"horovodrun": ["horovod.runner.launch", "--gloo"], "launch": ["trainkit", "launch"]}
JOINS = "a worker joins"
Note = dict[str, Any]
COLUMNS = ["change", "pause, s", "longest, s", "seen, s", "whole again, s", "steps repeated"]
SEEN_GOALS_S = {"small": 0.05, "large": 0.15}  # of a killed worker, with torch's collectives


@dataclass
class Changes:
    """What was measured, by case."""

    pauses: dict[str, list[float]] = field(default_factory=dict)
    seen: dict[str, list[float]] = field(default_factory=dict)
    whole: dict[str, list[float]] = field(default_factory=dict)
    repeated: dict[str, int] = field(default_factory=dict)
    # between two steps of a rank to which nothing happens
    steps: list[float] = field(default_factory=list)

    def row(self, case: str) -> list[Cell]:
        """Return the table's row of a case."""
        pauses, whole = self.pauses[case], self.whole.get(case)
        again = statistics.median(whole) if whole else None
        seen_s = statistics.median(self.seen[case])
        return [case, statistics.median(pauses), max(pauses), seen_s, again, self.repeated[case]]


Act = Callable[["Job"], None]


class Job:
    """A running job, seen by the notes of its ranks."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], log: Path) -> None:
        self.folder, self.process, self.log = folder, process, log

    def notes(self) -> dict[int, list[Note]]:
        """Return the notes by generation, by time."""
        of_generations: dict[int, list[Note]] = {}
        for path in self.folder.glob("steps-*"):
            for line in path.read_text().splitlines():
                if line.endswith("}"):
                    note = json.loads(line)
                    of_generations.setdefault(note["generation"], []).append(note)
        return {
            generation: sorted(of_generations[generation], key=lambda note: note["t"])
            for generation in sorted(of_generations)
        }

    def seen_at(self, after: float) -> float:
        """Return when the first rank saw a change after this time."""
        lines = [path.read_text().splitlines() for path in self.folder.glob("seen-*")]
        return min(at for own in lines for line in own if (at := float(line)) > after)

    def settle(self, ranks: int, after: int = 0, steps: int = SETTLED) -> dict[int, list[Note]]:
        """Wait until a generation later than `after` has this number of ranks, and these steps;
        return all notes.

        Raises:
            RuntimeError: that took too long, or the job has ended.
        """
        end = time.monotonic() + LIMIT_S
        while True:
            notes = self.notes()
            newest = list(notes.values())[-1] if notes else []
            if (
                len(newest) >= steps * ranks
                and newest[-1]["ranks"] == ranks
                and newest[-1]["generation"] > after
            ):
                return notes
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(
                    f"the job did not train on {ranks} ranks:\n{self.log.read_text()[-3000:]}"
                )
            time.sleep(0.1)

    def pid(self, rank: int) -> int:
        """Return the process of a rank of the newest generation."""
        return int(
            next(
                note["pid"]
                for note in reversed(list(self.notes().values())[-1])
                if note["rank"] == rank
            )
        )


def change(job: Job, changes: Changes, case: str, fault: Act, back: Act | None = None) -> None:
    """Let two ranks become one by a fault, and two again; note both changes.

    Args:
        job: on two ranks.
        changes: takes the figures.
        case: names them: "launcher: fault".
        fault: makes a rank go.
        back: makes room for another one; None: there is room.
    """
    joins = f"{case.partition(':')[0]}: {JOINS}"
    last = list(job.settle(2))[-1]
    began = time.monotonic()
    fault(job)
    if back is not None:
        job.settle(1, last, steps=2)
        back(job)
    notes = job.settle(2, last)
    alone, again = (generation for generation in notes if generation > last)
    for name, old, new in ((case, last, alone), (joins, alone, again)):
        stopped, continued = notes[old][-1]["t"], notes[new][0]["t"]
        changes.pauses.setdefault(name, []).append(continued - stopped)
        changes.seen.setdefault(name, []).append(continued - job.seen_at(stopped))
        twice = {note["step"] for note in notes[old]} & {note["step"] for note in notes[new]}
        changes.repeated[name] = changes.repeated.get(name, 0) + len(twice)
    if back is None:
        changes.whole.setdefault(case, []).append(notes[again][0]["t"] - began)
    of_one = [note["t"] for note in notes[last] if note["rank"] == 0]
    changes.steps += [b - a for a, b in zip(of_one, of_one[1:], strict=False)]


def write(path: Path, text: str, _: Job) -> None:
    """Write a file."""
    path.write_text(text)


def kill_worker(job: Job) -> None:
    """Kill the process of rank 1."""
    os.kill(job.pid(1), signal.SIGKILL)


def kill_actor(job: Job) -> None:
    """Kill the actor of rank 1."""
    stat = Path(f"/proc/{job.pid(1)}/stat").read_text()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)


@contextlib.contextmanager
def started(command: Sequence[str], width: int, folder: Path, **more: str) -> Iterator[Job]:
    """Start a job; it gets SIGTERM at the end, and nothing of it is left."""
    log = folder / "log.txt"
    with log.open("wb") as out:
        words = [*command, str(folder), str(width)]
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment(**more),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield Job(folder, process, log)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def with_driver(name: str, width: int, changes: Changes) -> None:
    """Measure one job under a launcher of DRIVERS."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        hosts = folder / "hosts"
        two, one = "localhost:1\n127.0.0.1:1\n", "localhost:1\n"
        hosts.write_text(two)
        launch = [sys.executable, "-m", *DRIVERS[name], "-np", "2", "--min-np", "1"]
        launch += ["--max-np", "2", "--host-discovery-script", f"cat {hosts}"]
        rank = [sys.executable, "-m", "benchmarks.recovery_rank"]
        with started([*launch, *rank], width, folder) as job:
            change(job, changes, f"{name}: worker killed", kill_worker)
            leave, come = (functools.partial(write, hosts, text) for text in (one, two))
            change(job, changes, f"{name}: a host leaves the list", leave, come)


class Raylets:
    """A Ray cluster of this host: a head without room for ranks,
    and two nodes with room for one each.
    """

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        # short: sockets' paths have at most 107 characters
        self._folder = tempfile.mkdtemp(prefix="rb", dir="/tmp")
        os.environ |= environment(RAY_TMPDIR=self._folder, RAY_USAGE_STATS_ENABLED="0")
        take_access({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
        self._node = {"num_cpus": 1, "object_store_memory": 150 * 2**20, "resources": {"slot": 1}}
        head = {"num_cpus": 0, "object_store_memory": 150 * 2**20, "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self._cluster.add_node(**self._node) for _ in range(2)]

    @property
    def address(self) -> str:
        """The head's."""
        return str(self._cluster.address)

    def add(self, _: Job) -> None:
        """Add a node."""
        self.nodes.append(self._cluster.add_node(**self._node))

    def kill(self, _: Job) -> None:
        """Kill the newest node's raylet, as a lost machine."""
        self._cluster.remove_node(self.nodes.pop(), allow_graceful=False)

    def drain(self, _: Job) -> None:
        """Announce that the newest node will go in ten minutes,
        as a cloud announces it of a spot machine.
        """
        words = [
            "drain-node",
            "--address",
            self.address,
            "--node-id",
            self.nodes[-1].node_id,
            "--reason-message",
            "spot",
        ]
        words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds", "600"]
        subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", *words], check=True, capture_output=True
        )

    def replace(self, job: Job) -> None:
        """Remove the drained node, and add one."""
        self._cluster.remove_node(self.nodes.pop())
        self.add(job)

    def close(self) -> None:
        """End all raylets, by their process ids."""
        self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def with_ray(raylets: Raylets, width: int, changes: Changes) -> None:
    """Measure one job on Ray."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started(
            [sys.executable, "-c", FIT], width, folder, RAY_ADDRESS=raylets.address
        ) as job:
            change(job, changes, "launcher=ray: worker killed", kill_worker)
            change(job, changes, "launcher=ray: its actor killed", kill_actor)
            change(job, changes, "launcher=ray: its node killed", raylets.kill, raylets.add)
            change(job, changes, "launcher=ray: its node drains", raylets.drain, raylets.replace)


def measure(short: bool) -> Findings:
    """Measure all launchers, in turns."""
    settings: dict[str, Cell] = {
        "ranks": 2,
        "threads of a rank": 1,
        "batch_size": BATCH,
        "wait in each step, s": STEP_S,
    }
    findings = Findings(settings=settings, missing=absent({"launcher=ray": "ray"}))
    with contextlib.ExitStack() as stack:
        raylets = None if findings.missing else stack.enter_context(contextlib.closing(Raylets()))
        for model, rounds in ({"small": 1} if short else ROUNDS).items():
            changes = Changes()
            for _ in range(rounds):
                for name in DRIVERS:
                    with_driver(name, WIDTHS[model], changes)
                if raylets is not None:
                    with_ray(raylets, WIDTHS[model], changes)
            plain: list[Cell] = [
                "no change: from step to step",
                statistics.median(changes.steps),
                max(changes.steps),
                None,
                None,
                0,
            ]
            title = f"A change of ranks, {model} model"
            cases = sorted(
                changes.pauses, key=lambda case: (case.partition(":")[0], case.endswith(JOINS))
            )
            findings.tables.append(Table(title, COLUMNS, [plain, *map(changes.row, cases)]))
            for case in [case for case in cases if case.endswith(JOINS)]:
                findings.targets.append(
                    Target(f"{case}, {model} model: pause", changes.row(case)[1], 1.0, "s")
                )  # type: ignore[arg-type]
            of_torch = changes.row("launch: worker killed")[3]
            what = f"launch: worker killed, {model} model: seen to next step"
            findings.targets.append(Target(what, of_torch, SEEN_GOALS_S[model], "s"))  # type: ignore[arg-type]
    return findings


if __name__ == "__main__":
    main(measure)
