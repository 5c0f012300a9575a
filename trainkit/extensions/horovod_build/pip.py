"""pip for Horovod: the packages it needs, its verified source, the installation of its wheel.

missing_needs, install_missing
verify, fetch_source      the release, from disk or from the index; its SHA-256 is checked before any of it runs
install_wheel
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import sys
from pathlib import Path

from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.horovod_build.probe import Machine
from trainkit.extensions.programs.commands import run

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# Horovod's imports at run time (setuptools provides distutils, which horovodrun imports, to Python
# 3.12 and later).
RUNTIME_NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi", "setuptools>=70")
BUILD_NEEDS = ("cmake>=3.21", "wheel", *RUNTIME_NEEDS)


def pip(*arguments: str) -> list[str]:
    """Return a command of this environment's pip, with the user's pip settings."""
    return [sys.executable, "-m", "pip", *arguments, "--no-input", "--disable-pip-version-check"]


def missing_needs(needs: tuple[str, ...], machine: Machine) -> list[str]:
    """Return the requirements of `needs` that this environment does not meet.
    Any CMake on the PATH is accepted.
    """
    return [need for need in needs if not _is_met(need, machine)]


def _is_met(need: str, machine: Machine) -> bool:
    name, _, least = need.partition(">=")
    if name == "cmake":
        return machine.cmake is not None and _numbers(machine.cmake.version) >= _numbers(least)
    try:
        return _numbers(importlib.metadata.version(name)) >= _numbers(least)
    except importlib.metadata.PackageNotFoundError:
        return False


def _numbers(version: str) -> tuple[int, ...]:
    match = re.search(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def install_missing(missing: list[str], log: Path) -> None:
    """Install requirements into this environment."""
    run(pip("install", *missing), what=f"Installing {', '.join(missing)}", log=log)


def verify(source: Path) -> None:
    """Reject a source that is not the release.

    Raises:
        ConfigError: the file does not exist.
        EngineError: the file is not the release; the message has both hashes.
    """
    if not source.is_file():
        raise ConfigError(
            f"--source is '{source}', which does not exist. Give the path of"
            f" horovod-{VERSION}.tar.gz."
        )
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    if digest != SHA256:
        raise EngineError(
            f"{source} is not the source of Horovod {VERSION}; none of it was run.\n"
            f"  its SHA-256 is  {digest}\n  it must be      {SHA256}\n"
            f"Get the release with: pip download --no-deps --no-binary horovod horovod=={VERSION}"
        )


def fetch_source(folder: Path, log: Path) -> Path:
    """Download the release from the package index, with the user's pip settings, and return its
    path.

    pip runs setup.py for the metadata; because a hash is required, it checks the file before that.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
    options = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--require-hashes"]
    command = pip("download", *options, "--dest", str(folder), "--requirement", str(requirements))
    run(command, what=f"Downloading the source of Horovod {VERSION}", log=log)
    source = next(folder.glob("horovod-*"))
    verify(source)
    return source


def install_wheel(wheel: Path, log: Path) -> None:
    """Install a wheel, replacing any installed Horovod."""
    run(
        pip("install", "--no-deps", "--force-reinstall", str(wheel)),
        what=f"Installing {wheel.name}",
        log=log,
    )
