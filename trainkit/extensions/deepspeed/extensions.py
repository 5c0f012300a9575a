"""The compiled parts of DeepSpeed: where they are built, and which are there; and the number of the
device, which DeepSpeed reads from the environment too. Imports no DeepSpeed.

torch compiles them on first use, into TORCH_EXTENSIONS_DIR, and marks a compile by a file named
`lock`. In older versions (2.15 asks the system for a lock that ends with its process) the file
stays if the process is killed, and every later start waits for it without a word.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from trainkit.errors import EngineError
from trainkit.extensions.programs.commands import cache_folder

_FOLDER = "TORCH_EXTENSIONS_DIR"
_LOCK = "lock"

# What trainkit can need -> for what. All else DeepSpeed does with torch's own operations.
PARTS = {
    "pin_memory": "offload to nvme",
    "async_io": "offload to nvme",
    "cpu_adam": "only a Task that makes a DeepSpeedCPUAdam itself",
}


def choose_folder(environ: MutableMapping[str, str]) -> Path:
    """Set the folder of compiled parts, unless the user has, and return it:
    one for each version of DeepSpeed and torch.
    """
    if not environ.get(_FOLDER):
        versions = (
            f"deepspeed-{_version('deepspeed')}-torch-{_torch()}-{sys.implementation.cache_tag}"
        )
        environ[_FOLDER] = str(cache_folder(environ) / "extensions" / versions)
    return Path(environ[_FOLDER])


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _torch() -> str:
    """Return torch's whole version, as 2.15.0+cu132, without loading it."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    match = (
        re.search(r"__version__ = ['\"]([^'\"]+)", file.read_text())
        if file is not None and file.is_file()
        else None
    )
    return match[1] if match else _version("torch")


def is_built(folder: Path, part: str) -> bool:
    """Whether a compiled part is there."""
    return (folder / part / f"{part}.so").is_file()


@contextlib.contextmanager
def building(folder: Path, part: str) -> Iterator[None]:
    """Compile within the context: no lock of a killed compile is waited for, and none stays behind.

    Raises:
        EngineError: another process compiles it.
    """
    if _is_compiling(folder / part):
        raise EngineError(
            f"{part} is being compiled by another process in {folder / part}. Wait until it ends,"
            " and repeat."
        )
    clear_locks(folder)
    try:
        yield
    finally:
        clear_locks(folder)


def clear_locks(folder: Path) -> None:
    """Remove the locks of compiles that no process works on any more."""
    for lock in folder.glob(f"*/{_LOCK}"):
        if not _is_compiling(lock.parent):
            lock.unlink(missing_ok=True)


def _is_compiling(folder: Path) -> bool:
    """Whether a process works in a folder, as ninja and the compilers do."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").resolve() == folder.resolve():
                return True
    return False


@contextlib.contextmanager
def as_local_rank(kind: str, index: int | None) -> Iterator[None]:
    """Have LOCAL_RANK be the number of this rank's device: DeepSpeed chooses by it, and a rank may
    see its own GPU alone.

    Args:
        kind, index: of the device, as torch has them.
    """
    before = os.environ.get("LOCAL_RANK")
    if kind != "cuda" or before is None:
        yield
        return
    os.environ["LOCAL_RANK"] = str(index)
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = before
