"""A storm of faults over an elastic job on simulated hosts, and what must hold after it.

    python -m tests.faults.storm --seed 1 --faults 100            # or --minutes 10, or both: the first that is reached
    python -m tests.faults.storm --seed 1 --engine ddp            # a job of `trainkit launch`, not of horovodrun

Faults come in rounds: one job each, from its start to its end, with 25 faults by default; then its
samples, weights, processes, files and ledger are checked. Needs root (namespaces, a mount), `ip`
and `tc`. The kinds and hosts of the faults follow from the seed; their timing is that of the
machine. Exit code: 0 if all promises held, 1 if not, 3 if no storm is possible here.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.storm import hosts as simulated
from tests.faults.storm.checks import Undisturbed, broken
from tests.faults.storm.disk import Disk
from tests.faults.storm.faults import FAULTS, Fault
from tests.faults.storm.job import RANKS
from tests.faults.storm.storm import LAUNCHERS, FindingError, Storm

IMPOSSIBLE = 3
_OVERLAP = 0.3  # of the faults come before the one before is survived
_TAIL = 4000


@dataclass
class Tally:
    """What a storm has seen."""

    survived: collections.Counter[str] = field(default_factory=collections.Counter)
    ends: collections.Counter[str] = field(default_factory=collections.Counter)
    rounds: int = 0
    findings: list[str] = field(default_factory=list)


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def draw(storm: Storm) -> str:
    """Inject a fault; return its kind."""
    while True:
        fault: Fault = storm.rng.choices(list(FAULTS), weights=list(FAULTS.values()))[0]
        done = fault(storm)
        if done is not None:
            name = fault.__name__.replace("_", " ")
            say(f"  {name} {done} at step {storm.step[0]}")
            return name


def one_round(
    folder: Path,
    seed: str,
    faults: int,
    until: float,
    tally: Tally,
    *,
    undisturbed: Undisturbed,
    engine: str,
) -> None:
    """Run one job through faults to its end, and check what must hold."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(Disk(folder / "disk"))
        hosts = stack.enter_context(simulated.Hosts(folder, RANKS[engine]))
        rng = random.Random(seed)
        storm = stack.enter_context(Storm(folder, rng, disk, hosts, say, engine))
        drawn: list[str] = []
        try:
            storm.await_checkpoint()
            while len(drawn) < faults and time.monotonic() < until:
                drawn.append(draw(storm))
                if storm.rng.random() > _OVERLAP:
                    say(
                        f"    survived: {storm.await_progress():.1f} s later it trains again, at"
                        f" step {storm.step[0]}"
                    )
                    time.sleep(storm.rng.uniform(0, 1))
                elif storm.code is not None:
                    storm.restart()
            storm.finish()
            failed = broken(storm, undisturbed)
        except FindingError as error:
            failed = [str(error)]
        tally.rounds += 1
        tally.ends.update(f"{why}: {code}" for why, code in storm.ends)
        if failed:
            tally.findings += [f"round {seed}, after {drawn[-5:]}: {text}" for text in failed]
            say(f"BROKEN in round {seed}: {failed}\n{storm.text[-_TAIL:]}")
        else:
            tally.survived.update(drawn)


def main() -> int:
    """Run rounds until there are enough faults, or the time is up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=10**9)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--per-round", type=int, default=25)
    parser.add_argument("--first-round", type=int, default=0)
    parser.add_argument("--engine", choices=LAUNCHERS, default="horovod")
    parser.add_argument(
        "--folder", type=Path, help="where files stay; default: a temporary folder that is deleted"
    )
    options = parser.parse_args()
    if why := simulated.unavailable():
        print(f"no storm is possible here: {why}")
        return IMPOSSIBLE
    tally, begin = Tally(), time.monotonic()
    until = begin + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="storm-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        undisturbed = Undisturbed(folder / "undisturbed")
        number = options.first_round
        while (left := options.faults - tally.survived.total()) > 0 and time.monotonic() < until:
            seed = f"{options.seed}.{number}"
            say(f"round {seed}")
            one_round(
                folder / f"round-{seed}",
                seed,
                min(left, options.per_round),
                until,
                tally,
                undisturbed=undisturbed,
                engine=options.engine,
            )
            number += 1
    minutes = (time.monotonic() - begin) / 60
    say(
        f"{tally.survived.total()} faults survived in {tally.rounds} rounds, {minutes:.1f} minutes,"
        f" seed {options.seed}, engine {options.engine}"
    )
    print(
        json.dumps(
            {
                "survived": dict(tally.survived),
                "ends": dict(tally.ends),
                "findings": tally.findings,
            },
            indent=1,
        )
    )
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
