"""Starts workers for claims of trainers, and collects what they say."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.conformance.broken import BREAKS
from benchmarks.conformance.cell import (
    clean_environment,
    default_launcher,
    end_marked,
    end_with_parent,
    launch_command,
)
from benchmarks.conformance.claims import load_claims
from benchmarks.conformance.sources import ALONE, DECLARED
from benchmarks.conformance.worker import TRAINERS

Results = dict[str, dict[str, dict[str, Any]]]  # claim -> trainer -> start -> result
LIMIT_S = 1500
ROOT = Path(__file__).parents[2]
OWN_PYTHON = {"Composer": ROOT / ".venv" / "composer" / "bin" / "python"}  # `make composer`


@dataclass(frozen=True)
class Start:
    """One worker, or two ranks of it.

    Attributes:
        trainer: which.
        launcher: "alone", "torchrun", "horovodrun" or "composer".
        names: the claims.
    """

    trainer: str
    launcher: str
    names: tuple[str, ...]


def plan(trainers: Iterable[str], names: Sequence[str]) -> list[Start]:
    """Return the workers that check claims of trainers; what is declared needs none."""
    starts = []
    for trainer in trainers:
        launchers = {"alone": 1}
        if trainer not in ALONE:
            launchers[default_launcher(trainer)] = 2
        if trainer == "trainkit":
            launchers["torchrun"] = 2
        for launcher, ranks in launchers.items():
            own = tuple(
                name
                for name in names
                if ranks in load_claims()[name].ranks and (trainer, name) not in DECLARED
            )
            if own:
                starts.append(Start(trainer, launcher, own))
    return starts


def run(start: Start) -> dict[str, dict[str, Any]]:
    """Start a worker; return claim -> its result."""
    python = OWN_PYTHON.get(start.trainer, Path(sys.executable))
    if not python.exists():
        missing = {"status": "error", "text": "`make composer` installs it", "seconds": 0.0}
        return dict.fromkeys(start.names, missing)
    environment = clean_environment() | {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "KERAS_BACKEND": "torch",
        "PYTHONPATH": str(ROOT),
    }
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        command = launch_command(start.launcher, 2, str(python))
        command += ["-m", "benchmarks.conformance.worker", "claims", start.trainer, folder]
        with (Path(folder) / "output.txt").open("w") as output:
            process = subprocess.Popen(
                [*command, *start.names],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=folder,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - this process has no threads
            )
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
            finally:
                end_marked(folder)
                process.wait()
        path = Path(folder) / "results.json"
        results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
        printed = (Path(folder) / "output.txt").read_text(errors="replace")[-1500:]
    for name in start.names:
        results.setdefault(name, {"status": "error", "text": printed, "seconds": 0.0})
    return results


def run_all(starts: Sequence[Start], quiet: bool = False) -> Results:
    """Start workers one after another; return all results."""
    results: Results = {}
    for start in starts:
        began = time.monotonic()
        for name, result in run(start).items():
            results.setdefault(name, {}).setdefault(start.trainer, {})[start.launcher] = result
            if not quiet:
                print(f"  {result['status']:8} {name}: {result['text']}", flush=True)
        if not quiet:
            took = time.monotonic() - began
            print(f"{start.trainer}, {start.launcher}: {len(start.names)} in {took:.0f} s")
    return results


def run_broken(only: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Check what each break turns; return break -> claim -> status."""
    table: dict[str, dict[str, str]] = {}
    for launcher in ("alone", "horovodrun"):
        names = [
            f"{claim}@{name}"
            for name, broken in BREAKS.items()
            if broken.launcher == launcher and (not only or name in only)
            for claim in (*broken.turns, broken.stays)
        ]
        if names:
            for name, result in run(Start("trainkit", launcher, tuple(names))).items():
                claim, _, broken = name.partition("@")
                table.setdefault(broken, {})[claim] = result["status"]
    return table


def unseen(table: dict[str, dict[str, str]]) -> list[str]:
    """Return what is wrong with a table of breaks: cells that did not turn, or that should not."""
    wrong = []
    for name, cells in table.items():
        broken = BREAKS[name]
        wrong += [f"{name}: {c} {cells[c]}" for c in broken.turns if cells[c] != "fails"]
        if cells[broken.stays] != "holds":
            wrong.append(f"{name}: {broken.stays} {cells[broken.stays]}")
    return wrong


def versions() -> dict[str, str]:
    """Return the versions of all trainers, of torch and Python."""
    from importlib.metadata import PackageNotFoundError, distributions, version

    versions = {"python": sys.version.split()[0]}
    for name in (
        "torch",
        "trainkit",
        "horovod",
        "lightning",
        "accelerate",
        "transformers",
        "pytorch-ignite",
        "keras",
    ):
        try:
            versions[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            versions[name] = "not installed"
    places = [str(path) for path in OWN_PYTHON["Composer"].parents[1].glob("lib/*/site-packages")]
    own = {part.name: part.version for part in distributions(path=places)}
    if places:
        versions["composer"] = f"{own['mosaicml']} (on torch {own['torch'].partition('+')[0]})"
    return versions


__all__ = ["TRAINERS", "Results", "Start", "plan", "run", "run_all", "versions"]
