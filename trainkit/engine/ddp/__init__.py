"""torch.distributed behind the engine's wall.
`trainkit.engine.ddp.DDPEngine` is the name that configs use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.engine.ddp.engine import DDPEngine as DDPEngine


def __getattr__(name: str) -> Any:
    """Import the engine when it is first used:
    tools that need no torch import modules of this package.
    """
    if name == "DDPEngine":
        return getattr(importlib.import_module("trainkit.engine.ddp.engine"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
