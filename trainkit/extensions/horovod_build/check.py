"""The installed Horovod: what it was built for, and a test that two ranks can reduce with it.

look     -> Installed | None    in a separate process: an import that fails or crashes is a result
prove    -> list[str]           horovodrun -np 2 --gloo (or mpirun -np 2), one allreduce, the numbers checked
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import EngineError
from trainkit.extensions.horovod_build.patches import edits_of, identity
from trainkit.extensions.horovod_build.pip import VERSION
from trainkit.extensions.horovod_build.probe import BuildPlan, Wanted
from trainkit.extensions.horovod_build.tools import Tool
from trainkit.extensions.programs.commands import failure, run
from trainkit.extensions.programs.local import start_with

TIMEOUT_S = 60.0

# `import horovod.torch` only prints a warning if the native library does not load; importing
# `mpi_lib_v2` raises the cause.
_LOOK = """
import importlib.metadata, importlib.util, json, pathlib
answer = {"version": importlib.metadata.version("horovod")}
built = pathlib.Path(importlib.util.find_spec("horovod").origin).with_name("metadata.json")
answer["built_for"] = json.loads(built.read_text()).get("pytorch") if built.is_file() else None
print(json.dumps(answer), flush=True)
try:
    import horovod.torch
    from horovod.torch import mpi_lib_v2
    parts = ("gloo", "mpi", "nccl", "cuda")
    answer["parts"] = [part for part in parts if getattr(horovod.torch, part + "_built")()]
except Exception as error:
    answer["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(answer), flush=True)
"""

# Rank 0 contributes 1 and rank 1 contributes 10: only a sum over both, each once, is 11.
_PROOF = """
import os
import torch
import horovod.torch as hvd
hvd.init()
on_gpu = hvd.nccl_built() and torch.cuda.device_count() >= hvd.local_size()
device = f"cuda:{hvd.local_rank()}" if on_gpu else "cpu"
total = hvd.allreduce(torch.tensor([10.0 ** hvd.rank()], device=device), op=hvd.Sum, name="trainkit.proof")
line = f"trainkit proof: rank {hvd.rank()} of {hvd.size()}, allreduce on {device} gives {total.item():g}\\n"
os.write(1, line.encode())  # at once: print writes the end of the line by itself, and mpirun may join two ranks' lines
"""
_PROVEN = re.compile(r"trainkit proof: (rank (\d) of 2, allreduce on \S+ gives 11)(?![\d.])")


@dataclass(frozen=True)
class Installed:
    """The Horovod of this environment.
    `parts`: the ones of gloo, mpi, nccl and cuda that it was built with.
    """

    version: str
    built_for: str | None
    parts: tuple[str, ...]
    error: str | None

    @property
    def edits(self) -> str | None:
        """The id of trainkit's edits in it, as returned by patches.identity()."""
        return edits_of(self.version)

    def problem(self, torch_version: str) -> str | None:
        """Return why it cannot be used with a torch of this version, or None."""
        if self.version.partition("+")[0] != VERSION:
            return f"it is version {self.version}, and trainkit needs {VERSION}"
        if self.edits is None:
            return (
                "it has none of trainkit's edits: elastic jobs, signed requests and errors instead"
                " of aborts need them"
            )
        if self.edits != identity():
            return (
                f"it has trainkit's edits of another version ({self.edits}; this trainkit's are"
                f" {identity()})"
            )
        if self.built_for not in (None, torch_version):
            return (
                f"it was built for torch {self.built_for}, and torch {torch_version} is installed"
            )
        if self.error is not None:
            return f"it does not import: {self.error}"
        if self.built_for is None:
            return "it was built without torch"
        return None if "gloo" in self.parts else "it was built without Gloo"

    def serves(self, plan: BuildPlan, wanted: Wanted) -> bool:
        """Return whether it has the planned parts.
        NCCL may be there unplanned if the user left it open; MPI never is.
        """
        nccl = "nccl" in self.parts
        return ("mpi" in self.parts) == plan.mpi.on and (
            nccl == plan.gpu.on or (wanted.gpu is None and nccl)
        )


def look() -> Installed | None:
    """Return the Horovod found by a new Python process; None if there is none."""
    command = [sys.executable, "-c", _LOOK]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, errors="replace", cwd=sys.prefix
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers:
        return None
    answer = json.loads(answers[-1])
    error = answer.get("error") or (
        f"the import ended with exit code {done.returncode}" if done.returncode else None
    )
    return Installed(answer["version"], answer["built_for"], tuple(answer.get("parts", ())), error)


def prove(log: Path, environ: Mapping[str, str], mpirun: Tool | None = None) -> list[str]:
    """Run an allreduce on two ranks with this environment's horovodrun, and return each rank's
    result.

    Args:
        mpirun: starts the ranks, in place of horovodrun.

    Raises:
        EngineError: the ranks did not start, did not end within TIMEOUT_S, or got other numbers.
    """
    what = "The test, an allreduce of two ranks,"
    env = {name: value for name, value in environ.items() if not name.startswith("HOROVOD_")}
    start = start_with("horovodrun", 2) if mpirun is None else [*mpi_start(mpirun), sys.executable]
    with tempfile.TemporaryDirectory(prefix="trainkit-proof-") as folder:
        script = Path(folder) / "proof.py"
        script.write_text(_PROOF, encoding="utf-8")
        lines = run([*start, str(script)], what=what, log=log, env=env, timeout_s=TIMEOUT_S)
    proven = sorted(result.groups() for line in lines for result in _PROVEN.finditer(line))
    if [rank for _, rank in proven] != ["0", "1"]:
        raise EngineError(
            failure(f"{what} gave other numbers than 11 on ranks 0 and 1", lines, log)
        )
    return [text for text, _ in proven]


def mpi_start(mpirun: Tool) -> list[str]:
    """Return the start of a command of mpirun for two ranks.
    Open MPI refuses root, and more ranks than cores, unless it is permitted.
    """
    if not mpirun.version.startswith("Open MPI"):
        return [mpirun.path, "-np", "2"]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [mpirun.path, *root, "--oversubscribe", "-np", "2"]
