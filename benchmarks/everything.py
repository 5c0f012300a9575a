"""Runs all benchmarks one after the other and saves their findings.

    python -m benchmarks.everything [--short] [--only NAME ...] [--out FILE]

Results go to benchmarks/results.json, which `python -m benchmarks.page` turns into the tables of
README.md beside it, and a line of each to history.jsonl (history.py). With --only the others'
results stay. A failed benchmark keeps its earlier findings, and is named at the end.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import history

RESULTS = Path(__file__).parent / "results.json"
NAMES = (
    "overhead",
    "kinds",
    "growth",
    "startup",
    "memory",
    "throughput",
    "unequal",
    "data",
    "validation",
    "checkpoints",
    "elastic",
    "recovery",
    "watching",
    "communication",
    "slow_link",
    "sharding",
    "pipelines",
    "driver",
    "finetuning",
)
PACKAGES = (
    "torch",
    "torchvision",
    "horovod",
    "lightning",
    "accelerate",
    "pytorch-ignite",
    "nvidia-dali-cuda130",
    "ray",
    "transformers",
    "peft",
    "trl",
)


def machine() -> dict[str, Any]:
    """Return the machine and versions of the figures."""
    models = [
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "processor": models[0].partition(": ")[2] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory),
        "python": platform.python_version(),
        **{name: version for name, version in versions.items() if version},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def run(name: str, short: bool) -> dict[str, Any] | None:
    """Run one benchmark; return its findings, or None if it failed."""
    print(f"-- {name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [
            sys.executable,
            "-m",
            f"benchmarks.{name}",
            "--json",
            str(out),
            *(["--short"] if short else []),
        ]
        done = subprocess.run(command, check=False)
        return json.loads(out.read_text()) if done.returncode == 0 and out.exists() else None


def main() -> None:
    """Run the requested benchmarks."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--short",
        action="store_true",
        help="smoke test of each contender; the figures mean nothing",
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    kept: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    failed = []
    for name in options.only:
        found = run(name, options.short)
        if found is None:
            failed.append(name)
            continue
        kept[name] = found | {"date": date.today().isoformat(), "machine": machine()}
        if options.out == RESULTS and not options.short:
            history.append(name, found, kept[name]["machine"])
        options.out.write_text(
            json.dumps({name: kept[name] for name in NAMES if name in kept}, indent=1) + "\n"
        )
    if failed:
        sys.exit(f"These benchmarks failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
