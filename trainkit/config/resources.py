"""Locates trainkit's recipes and configs:
beside the package in a checkout, inside it in a wheel.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trainkit import extension


def shipped_root() -> Path:
    """Return the folder that holds recipes/ and conf/."""
    inside = Path(__file__).parents[1] / "shipped"
    return inside if inside.is_dir() else Path(__file__).parents[2]


def conf_folders(start: Path) -> list[Path]:
    """Return the config folders in the order of the search:
    the user's own, the shipped one, those of extensions.
    """
    folders = [start / "conf", shipped_root() / "conf", *extension.conf_folders()]
    return list(dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir()))


def make_importable() -> None:
    """Make modules in the current folder importable first, and the shipped recipes last."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if str(shipped_root()) not in sys.path:
        sys.path.append(str(shipped_root()))
