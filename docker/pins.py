"""Prints pins of requirements-dev.txt, with their hashes, of some packages and all that they need:
for pip's --require-hashes.

    python pins.py [--without-torch] NAME...        NAME: numpy, torch==2.15.0, trainkit, trainkit[wandb,mlflow]

What needs what is in the comments of uv ("# via"); what trainkit needs is in pyproject.toml beside
it. Needs only Python.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

_OF_TORCH = re.compile(r"(torch|torchvision|triton|nvidia-(?!ml-py)[a-z0-9-]+|cuda-[a-z0-9-]+)$")


def normal(requirement: str) -> str:
    """Return the name of a requirement as pip compares it: Some_Name[x]>=1 is some-name."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]).lower()


def of_trainkit(requirement: str, pyproject: Path) -> list[str]:
    """Return what trainkit, or extras of it (trainkit[a,b]), needs."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = re.search(r"\[(.*)\]", requirement)
    if extras is None:
        return list(project["dependencies"])
    names = [name.strip() for name in extras[1].split(",") if name.strip()]
    known = project["optional-dependencies"]
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"trainkit has no extra {unknown[0]}; it has {', '.join(known)}.")
    return [needed for name in names for needed in known[name]]


def pinned(wanted: Iterable[str], pins: Path, pyproject: Path, without_torch: bool = False) -> str:
    """Return the lines of the pins of these requirements and of all that they need."""
    blocks: dict[str, str] = {}
    needs: dict[str, set[str]] = {}
    for block in re.split(r"\n(?=[A-Za-z0-9])", pins.read_text()):
        lines = block.splitlines()
        name = normal(lines[0])
        blocks[name] = (
            f"{blocks.get(name, '')}{chr(10).join(line for line in lines if '#' not in line)}\n"
        )
        for line in lines:
            if found := re.match(r"\s+#(?: via)?\s+([\w.-]+)$", line):
                needs.setdefault(normal(found[1]), set()).add(name)
    there: set[str] = set()
    waiting = list(wanted)
    while waiting:
        requirement = waiting.pop()
        name = normal(requirement)
        if name == "trainkit":
            waiting += of_trainkit(requirement, pyproject)
        elif name not in there:
            has = blocks[name].split(maxsplit=1)[0] if name in blocks else "no such package"
            if name not in blocks or ("==" in requirement and requirement != has):
                sys.exit(f"{requirement} has no hash: {pins.name} has {has}.")
            there.add(name)
            waiting += needs.get(name, ())
    return "".join(
        blocks[name] for name in sorted(there) if not (without_torch and _OF_TORCH.match(name))
    )


if __name__ == "__main__":
    _here = Path(__file__).parent
    _names = [word for word in sys.argv[1:] if word != "--without-torch"]
    print(
        pinned(
            _names,
            _here / "requirements-dev.txt",
            _here / "pyproject.toml",
            "--without-torch" in sys.argv,
        ),
        end="",
    )
