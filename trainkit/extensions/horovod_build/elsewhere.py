"""An environment of its own for a build for another Python or torch: made in a temporary folder,
and deleted after the build.

run_in                   make it, and run a command of this trainkit in it
|- find_python           the interpreter
`- torch_requirement     pip's requirement
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from trainkit.errors import ConfigError
from trainkit.extensions.horovod_build.tools import output_of
from trainkit.extensions.programs.commands import run

_NEEDS = ("rich",)  # what `trainkit horovod` imports beside the standard library
_OLDEST = (3, 10)
_TRAINKIT = Path(__file__).parents[2]


def run_in(
    arguments: list[str],
    *,
    python: str | None,
    torch: str,
    environ: Mapping[str, str],
    log: Path,
    say: Callable[[str], None],
) -> int:
    """Run `python -m trainkit` with `arguments` in an environment with another Python and torch;
    return its exit code.

    Args:
        python: the version (3.12) or the path of an interpreter of this machine; None for this one.
        torch: a version: 2.15 for its newest patch, 2.15.0, or 2.15.0+cu130.

    Raises:
        ConfigError: there is no such interpreter, or the version is malformed.
        EngineError: the environment could not be made.
    """
    interpreter = find_python(python, environ)
    requirement = torch_requirement(torch)
    with tempfile.TemporaryDirectory(prefix="trainkit-horovod-") as name:
        folder = Path(name)
        say(
            f"Making an environment of {interpreter} with {requirement} for the build (up to 5 GB;"
            " deleted afterwards)."
        )
        run([interpreter, "-m", "venv", str(folder / "env")], what="Making an environment", log=log)
        there = str(folder / "env" / "bin" / "python")
        options = ["--no-input", "--disable-pip-version-check"]
        run(
            [there, "-m", "pip", "install", *options, requirement, *_NEEDS],
            what=f"Installing {requirement}",
            log=log,
        )
        # holds trainkit alone: what else is installed beside it is for this Python
        site = folder / "site"
        site.mkdir()
        (site / "trainkit").symlink_to(_TRAINKIT)
        env = {**environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [there, "-m", "trainkit", *arguments], check=False, env=env, cwd=folder
        ).returncode


def find_python(python: str | None, environ: Mapping[str, str]) -> str:
    """Return the path of an interpreter, by its version or path; None for this one."""
    if python is None:
        return sys.executable
    version = re.fullmatch(r"(\d+)\.(\d+)", python)
    if version is not None and (int(version[1]), int(version[2])) < _OLDEST:
        raise ConfigError(
            f"--python is {python}; trainkit runs on Python {_OLDEST[0]}.{_OLDEST[1]} or later."
        )
    name = f"python{python}" if version else python
    path = shutil.which(name, path=environ.get("PATH"))
    # found may be pyenv's name
    real = output_of([path, "-c", "import sys; print(sys.executable)"]).strip() if path else ""
    if not real:
        wanted = f"{path or name} {'is no Python that runs' if path else 'is not on the PATH'}"
        package = name if version else "python3"
        raise ConfigError(
            f"--python is {python}, and {wanted}. Install that Python with its headers and venv"
            f" (Debian, Ubuntu: apt-get install {package}-dev {package}-venv; or uv python"
            " install), or give an interpreter's path."
        )
    return real


def torch_requirement(torch: str) -> str:
    """Return pip's requirement for a version of torch: 2.15 is its newest patch."""
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?(\+\w+)?", torch):
        raise ConfigError(
            f"--torch is '{torch}'; it must be a version: 2.15, 2.15.0 or 2.15.0+cu130."
        )
    return f"torch=={torch}" if "+" in torch or torch.count(".") == 2 else f"torch=={torch}.*"
