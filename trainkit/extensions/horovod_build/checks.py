"""Horovod: whether it is installed and fits, and its build options."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from trainkit.extension import Finding
from trainkit.extensions.doctor.software import TorchSeen, ask_torch
from trainkit.extensions.horovod_build import check as build_check
from trainkit.extensions.horovod_build.check import Installed
from trainkit.extensions.horovod_build.probe import Machine, probe, search_path

AREA = "Horovod"
INSTALL = "python -m trainkit horovod install"


def check() -> Iterator[Finding]:
    """Look at this machine."""
    yield from look(build_check.look(), ask_torch(), probe(os.environ))


def look(installed: Installed | None, torch: TorchSeen, machine: Machine) -> Iterator[Finding]:
    """Yield the findings from Horovod and torch as seen by a new Python process,
    and from this machine's build tools.
    """
    if installed is None:
        why = "horovodrun and engine=horovod need it; torchrun and a single process do not."
        yield Finding(AREA, "installed", "none", "wrong", why, INSTALL)
        yield from _compilers(machine)
        return
    if torch.torch is None:
        yield Finding(
            AREA, "installed", f"{installed.version} (its fit cannot be checked without torch)"
        )
    elif (problem := installed.problem(torch.torch)) is None:
        yield Finding(AREA, "installed", installed.version)
    else:
        yield Finding(
            AREA, "installed", installed.version, "wrong", f"It cannot be used: {problem}.", INSTALL
        )
    yield Finding(AREA, "built for", f"torch {installed.built_for}")
    yield Finding(
        AREA,
        "controllers",
        ", ".join(part for part in ("gloo", "mpi") if part in installed.parts) or "none",
    )
    if "nccl" in installed.parts:
        yield Finding(AREA, "sums on GPUs", "NCCL")
    elif torch.gpus:
        why = "engine=horovod needs engine.device=cpu: this Horovod cannot sum what is on a GPU."
        yield Finding(AREA, "sums on GPUs", "none", "wrong", why, f"{INSTALL} --gpu")
    else:
        yield Finding(AREA, "sums on GPUs", "no NCCL (there is no GPU)")
    yield Finding(AREA, "Adasum", "yes" if "mpi" in installed.parts else "no: it needs MPI")
    yield _launcher(shutil.which("horovodrun"))
    if machine.mpicxx is not None:
        yield Finding(AREA, "MPI here", machine.mpicxx.version)


def _launcher(path: str | None) -> Finding:
    """Check the launcher that the user's shell finds, if any."""
    own = Path(search_path({}).partition(":")[0]) / "horovodrun"
    if not own.is_file():
        why = "The launcher is not among this environment's scripts."
        return Finding(
            AREA,
            "horovodrun",
            "none",
            "warning",
            why,
            "python -m horovod.runner.launch instead of horovodrun",
        )
    if path is None or Path(path).resolve() != own.resolve():
        why = f"A shell finds {path or 'none'}, not this environment's."
        return Finding(
            AREA, "horovodrun", str(own), "warning", why, f". {own.with_name('activate')}"
        )
    return Finding(AREA, "horovodrun", str(own))


def _compilers(machine: Machine) -> Iterator[Finding]:
    missing = [
        name for name, tool in (("g++", machine.compiler), ("make", machine.make)) if tool is None
    ]
    if missing:
        why = "Horovod is built from source."
        yield Finding(
            AREA,
            "to build it",
            f"missing: {', '.join(missing)}",
            "wrong",
            why,
            "apt-get install g++ make",
        )
