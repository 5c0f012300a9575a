"""Programs of this machine: where they are, and what they say of themselves."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Tool:
    """A build program: its path, and its own version text."""

    path: str
    version: str


def output_of(command: list[str]) -> str:
    """Return the output of a short command, or an empty text if it fails."""
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120,
            cwd=sys.prefix,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def find_tool(name: str, path: str, ask: str = "--version") -> Tool | None:
    """Return a program of the PATH with the first line that it prints about itself, or None."""
    program = shutil.which(name, path=path)
    if program is None:
        return None
    lines = output_of([program, ask]).splitlines()
    return Tool(program, lines[0].strip() if lines else "unknown version")


def find_mpirun(path: str) -> Tool | None:
    """Return the launcher of Open MPI or MPICH, its version as "Open MPI 4.1.4" or "MPICH 4.0.2";
    None: there is none.
    """
    mpirun = shutil.which("mpirun", path=path)
    if mpirun is None:
        return None
    text = output_of([mpirun, "--version"])
    open_mpi = re.search(r"\(Open MPI\) (\S+)", text)
    hydra = re.search(r"HYDRA.*?\bVersion:\s+(\S+)", text, re.DOTALL)
    if open_mpi:
        return Tool(mpirun, f"Open MPI {open_mpi[1]}")
    return Tool(
        mpirun,
        f"MPICH {hydra[1]}" if hydra else text.partition("\n")[0].strip() or "unknown version",
    )


def has_mpi_header(mpicxx: Tool) -> bool:
    """Return whether MPI's compiler finds mpi.h:
    Debian packs the compiler with mpirun, and the headers apart.
    """
    command = [mpicxx.path, "-E", "-x", "c++", "-"]
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            input="#include <mpi.h>\n",
        )
    except (OSError, subprocess.TimeoutExpired):
        return True  # it is another fault, which the build reports
    return done.returncode == 0 or "mpi.h" not in done.stderr


def mpi_family(tool: Tool) -> str | None:
    """Return "Open MPI" or "MPICH", by the text of an mpicxx or mpirun; None: it does not say."""
    text = tool.version.lower()
    if "mpich" in text or "hydra" in text:
        return "MPICH"
    return "Open MPI" if "open mpi" in text or "openmpi" in text or "mpi_cxx" in text else None
