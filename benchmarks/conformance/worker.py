"""The process, or each rank of a launcher, in which claims of one trainer are checked.

    python -m benchmarks.conformance.worker claims TRAINER FOLDER CLAIM[@BREAK] ...
    python -m benchmarks.conformance.worker one TRAINER FOLDER     one run, of FOLDER/fit.json

The first writes FOLDER/results.json after each claim. It imports the trainer and trains nothing:
runs are forked from it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.conformance.cell import (
    Cell,
    FailsError,
    NotSupportedError,
    RefusedError,
)
from benchmarks.conformance.claims import load_claims
from benchmarks.conformance.work import Fit, Record

TRAINERS = {
    "trainkit": "trainkit_",
    "by hand": "by_hand",
    "Lightning": "lightning_",
    "Accelerate": "accelerate_",
    "transformers": "transformers_",
    "ignite": "ignite_",
    "Keras": "keras_",
    "Composer": "composer_",
}
LINE = 240  # of a result's text


def module_of(trainer: str) -> ModuleType:
    """Import a trainer's programs."""
    module = importlib.import_module(f"benchmarks.conformance.trainers.{TRAINERS[trainer]}")
    importlib.import_module("torch._dynamo")  # the first optimizer of each run would import it
    module.set_up()
    return module


def check(cell: Cell, name: str) -> dict[str, object]:
    """Return the result of a claim."""
    started = time.monotonic()
    try:
        status, text = "holds", load_claims()[name].program(cell)
    except FailsError as error:
        status, text = "fails", str(error)
    except RefusedError as error:
        status, text = "refused", str(error)
    except NotSupportedError as error:
        status, text = "not run", str(error)
    except Exception:
        status, text = "error", traceback.format_exc()[-2000:]
    seconds = round(time.monotonic() - started, 2)
    text = text if status == "error" else text[:LINE]
    return {"status": status, "text": text.replace(str(cell.folder), "..."), "seconds": seconds}


def check_all(trainer: str, folder: Path, names: list[str]) -> None:
    """Check claims one after another."""
    module = module_of(trainer)
    cells: dict[str, Cell] = {}
    results = {}
    for name in names:
        claim, _, broken = name.partition("@")
        if broken not in cells:
            own = folder / (broken or "whole")
            own.mkdir(exist_ok=True)
            cells[broken] = Cell(trainer, module, own, broken)
        results[name] = check(cells[broken], claim)
        if cells[broken].rank == 0:
            print(f"{name}: {results[name]}", flush=True)
            part = folder / "results.part"
            part.write_text(json.dumps(results))
            part.replace(folder / "results.json")


def run_one(trainer: str, folder: Path) -> None:
    """Run the Fit of a folder, as a rank of a launcher."""
    given = json.loads((folder / "fit.json").read_text())
    fit = Fit(**given | {"scores": tuple(given["scores"])})
    record = Record(fit, folder, int(os.environ.get("HOROVOD_RANK", os.environ.get("RANK", "0"))))
    module = module_of(trainer)
    torch.set_num_threads(1)
    (folder / f"started-{record.rank}").touch()
    try:
        module.fit(fit, record)
    finally:
        record.save()


if __name__ == "__main__":
    kind, trainer, where, *names = sys.argv[1:]
    if kind == "one":
        run_one(trainer, Path(where))
    else:
        check_all(trainer, Path(where), names)
