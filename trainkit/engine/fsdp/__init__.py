"""torch's FSDP2 behind the engine's wall.
`trainkit.engine.fsdp.FSDPEngine` is the name that configs use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.engine.fsdp.engine import FSDPEngine as FSDPEngine


def __getattr__(name: str) -> Any:
    """Import the engine when it is first used:
    tools that need no torch import modules of this package.
    """
    if name == "FSDPEngine":
        return getattr(importlib.import_module("trainkit.engine.fsdp.engine"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
