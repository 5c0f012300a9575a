"""Trains the golden runs with the oldest, a middle and the newest torch on each engine, and compares their losses.

    python -m tests.golden.versions             # all versions, a quarter of an hour on two cores
    python -m tests.golden.versions 2.15.0      # one version: its row is made again
    python -m tests.golden.versions --page      # writes the table of docs/elastic.md alone

Each version has an environment of its own in build/versions, with Horovod built for it. The losses
go to versions.json, the table of what is equal into docs/elastic.md.

A step is two microbatches: one process accumulates them, two ranks compute one each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.golden.record import COMMON, RUNS, processor, step_losses
from tests.helpers.launching import run_command

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).with_name("versions.json")
PAGE = ROOT / "docs" / "elastic.md"
BEGIN, END = "<!-- versions -->", "<!-- /versions -->"
# torch: the torchvision that was released beside it
VERSIONS = {"2.11.0": "0.26.0", "2.13.0": "0.28.0", "2.15.0": "0.29.2"}
REFERENCE = "2.15.0"
LAYOUTS = {
    "one process": "python -m trainkit fit",
    "horovod, 2 ranks": "horovodrun -np 2 python -m trainkit fit engine=horovod",
    "ddp, 2 ranks": "torchrun --nproc-per-node 2 -m trainkit fit engine=ddp",
    "fsdp, 2 ranks": "torchrun --nproc-per-node 2 -m trainkit fit engine=fsdp",
}
# The samples of a step: two microbatches of RUNS.
GLOBAL_BATCHES = {"mlp": 32, "gpt": 4, "resnet18": 8}
PRECISIONS = ("32-true", "64-true")
# By layout, "run precision": the loss of each step as metrics.csv writes it.
Losses = dict[str, dict[str, list[str]]]


def environment(torch: str) -> Path:
    """Return the folder of an environment with that torch, which is made if it is missing.

    `===` compares the text: `==` also takes 2.13.0+cpu, which fits no torchvision.
    """
    folder = ROOT / "build" / "versions" / torch
    ready = folder / "ready"
    if ready.exists():
        return folder
    python = folder / "bin" / "python"
    uv = Path(sys.executable).with_name("uv")
    wanted = [f"torch==={torch}", f"torchvision=={VERSIONS[torch]}", "scikit-learn", "uv", "pytest"]
    for command in (
        [sys.executable, "-m", "venv", folder],
        [uv, "pip", "install", "--quiet", "--python", python, "-e", f"{ROOT}[horovod]", *wanted],
        [python, "-m", "trainkit", "horovod", "install"],
    ):
        subprocess.run([str(word) for word in command], check=True, cwd=ROOT)
    ready.touch()
    return folder


def command(layout: str, run: str, precision: str) -> str:
    """Return the command that trains one run on one layout."""
    batch = GLOBAL_BATCHES[run]
    return (
        f"{LAYOUTS[layout]} {RUNS[run]} {COMMON} trainer.precision={precision} run_dir=golden"
        f" trainer.global_batch_size={batch} trainer.lr_reference_batch_size={batch}"
    )


def losses(layout: str, run: str, precision: str, path: str = "") -> list[str]:
    """Train one run; return the loss of each step as metrics.csv writes it.

    Args:
        path: the folder of an environment's commands; otherwise this one's.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = run_command(
            command(layout, run, precision),
            Path(folder),
            timeout_s=400,
            PYTHONPATH=str(ROOT),
            OMP_NUM_THREADS="1",
            **({"PATH": f"{path}:{os.environ['PATH']}"} if path else {}),
        )
        assert done.code == 0, done.text
        return step_losses(Path(folder, "golden", "metrics.csv"))


def record(torch: str) -> Losses:
    """Return the losses of all runs with that torch."""
    folder = environment(torch)
    result: Losses = {}
    for layout in LAYOUTS:
        print(f"torch {torch}: {layout}", flush=True)
        result[layout] = {
            f"{run} {precision}": losses(layout, run, precision, str(folder / "bin"))
            for run in GLOBAL_BATCHES
            for precision in PRECISIONS
        }
    return result


def difference(values: list[str], reference: list[str]) -> str:
    """Return 'equal' if all digits are, else the largest relative difference of a step's loss."""
    if values == reference:
        return "equal"
    pairs = zip(map(float, values), map(float, reference), strict=True)
    return f"{max(abs(a - b) / abs(b) for a, b in pairs):.0e}"


def reference_of(layout: str) -> str:
    """Return the layout that another one is compared with: a step's loss is that of the last
    microbatch on rank 0, which on two ranks is another one than in one process.
    """
    return layout if layout == "one process" else "horovod, 2 ranks"


def table(stored: dict[str, dict[str, Losses]]) -> str:
    """Return the table: a row for each torch and layout, beside the reference's."""
    by_version = stored["losses"]
    columns = [f"{run} {precision}" for run in GLOBAL_BATCHES for precision in PRECISIONS]
    heads = [f"{run}, float{precision[:2]}" for run in GLOBAL_BATCHES for precision in PRECISIONS]
    rows = [
        f"| torch | layout | {' | '.join(heads)} |",
        f"| --- | --- |{' --- |' * len(heads)}",
    ]
    for torch in sorted(by_version, reverse=True):
        for layout in LAYOUTS:
            values, reference = (
                by_version[torch][layout],
                by_version[REFERENCE][reference_of(layout)],
            )
            cells = [difference(values[name], reference[name]) for name in columns]
            rows.append(f"| {torch} | {layout} | {' | '.join(cells)} |")
    return "\n".join(rows)


def fill(page: str, stored: dict[str, dict[str, Losses]]) -> str:
    """Return the page with the table."""
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{table(stored)}\n{END}{tail}"


def main() -> None:
    """Record, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.versions")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=", ".join(VERSIONS))
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.versions) - set(VERSIONS):
        parser.error(f"no such version: {', '.join(unknown)}; there are {', '.join(VERSIONS)}")
    stored = json.loads(STORED.read_text()) if STORED.exists() else {"losses": {}}
    for torch in [] if options.page else options.versions or VERSIONS:
        stored["losses"][torch] = record(torch)
        stored["processor"] = processor()
        STORED.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(fill(PAGE.read_text(), stored))


if __name__ == "__main__":
    main()
