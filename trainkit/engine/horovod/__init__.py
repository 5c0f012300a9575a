"""Horovod behind the engine's wall.
`trainkit.engine.horovod.HorovodEngine` is the name that configs use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.engine.horovod.engine import HorovodEngine as HorovodEngine


def __getattr__(name: str) -> Any:
    """Import the engine when it is first used:
    tools that need no torch import modules of this package.
    """
    if name == "HorovodEngine":
        return getattr(importlib.import_module("trainkit.engine.horovod.engine"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
