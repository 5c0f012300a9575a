"""Security: files that came from others."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.conformance.cell import Cell, FailsError
from benchmarks.conformance.claims.table import claim, difference
from benchmarks.conformance.work import Fit

RUN = Fit(shuffle=True, save_every=5)
PLAIN = (".json", ".yaml", ".safetensors", ".h5", ".csv", ".txt", ".log")


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def poison(folder: Path, mark: Path) -> list[str]:
    """Replace all files of checkpoints that are not plain data; return their names."""
    names = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file() or path.name.startswith("."):
            continue
        if path.suffix not in PLAIN:
            torch.save({"state": Command(mark)}, path)
            names.append(path.name)
    return sorted(set(names))


@claim("security")
def a_checkpoint_runs_no_command(cell: Cell) -> str:
    """A checkpoint whose files were replaced by pickles that call os.system is refused, and the
    command does not run.
    """
    stopped = cell.copy(cell.fit(replace(RUN, kill_after=5)))
    mark = cell.folder / "checkpoint-ran"
    names = poison(stopped.folder / "run", mark)
    if hasattr(cell.module, "sign"):
        cell.module.sign(stopped.folder / "run")
    run = cell.attempt(replace(RUN, resume=True, untrusted=True), stopped)
    if mark.exists():
        raise FailsError(f"the command ran ({', '.join(names)})")
    return f"{', '.join(names) or 'no pickle is in it'}; exit code {run.codes[0]}"


@claim("security")
def a_file_of_weights_runs_no_command(cell: Cell) -> str:
    """A file of weights (.pt, .bin or the trainer's own) that is a pickle which calls os.system is
    refused, and the command does not run.
    """
    mark = cell.folder / "weights-ran"
    file = cell.folder / "weights.pt"
    if not file.exists():
        torch.save({"state": Command(mark)}, file)
        (cell.folder / "plain.pickle").write_bytes(pickle.dumps(Command(mark)))
    run = cell.attempt(Fit(options={"weights": str(file)}), call="load_weights")
    if mark.exists():
        raise FailsError("the command ran")
    if run.codes[0] == 0:
        raise FailsError("the file was taken without an error")
    return f"refused: {run.last_line[:120]}"


@claim("security")
def a_config_runs_no_command(cell: Cell) -> str:
    """A config file that names subprocess.getoutput where a class belongs is refused, and the command
    does not run.
    """
    mark = cell.folder / "config-ran"
    run = cell.attempt(Fit(options={"mark": str(mark)}), call="read_config")
    if mark.exists():
        raise FailsError("the command ran")
    if run.codes[0] == 0:
        raise FailsError("the config was taken without an error")
    return f"refused: {run.last_line[:120]}"


@claim("security", own=True)
def a_changed_byte_is_seen(cell: Cell) -> str:
    """One changed byte in the weights of a checkpoint is not used in silence: the run ends with an
    error, or takes an earlier checkpoint.
    """
    whole = cell.fit(RUN)
    stopped = cell.copy(cell.fit(replace(RUN, kill_after=5)))
    files = [p for p in (stopped.folder / "run").rglob("*") if p.is_file() and not p.is_symlink()]
    weights = [p for p in files if "model" in p.name or "weights" in p.name]
    for path in weights or [max(files, key=lambda p: p.stat().st_size)]:
        change_a_weight(path)
    run = cell.attempt(replace(RUN, resume=True), stopped)
    if run.codes[0]:
        return f"refused: {run.last_line[:120]}"
    apart = difference(whole.first["weights"], run.first["weights"])
    if apart > 0.05:
        raise FailsError(f"the run took it without an error; weights differ by {apart:.2g}")
    return f"weights differ by {apart:.2g}"


def change_a_weight(path: Path) -> None:
    """Change the highest bits of a float of the file: the last one of its tensors' bytes."""
    data = bytearray(path.read_bytes())
    known = (0.05 * torch.ones(1)).numpy().tobytes()
    assert len(known) == 4
    place = last_floats(data)
    data[place + 3] ^= 0x02
    path.write_bytes(bytes(data))


def last_floats(data: bytearray) -> int:
    """Return the place of eight successive float32 that look like weights."""
    import numpy

    for place in range(0, len(data) - 32, 4):
        numbers = numpy.frombuffer(bytes(data[place : place + 32]), "<f4")
        if (
            numpy.isfinite(numbers).all()
            and (abs(numbers) > 1e-3).all()
            and (abs(numbers) < 1).all()
        ):
            return place
    return len(data) // 2 // 4 * 4
