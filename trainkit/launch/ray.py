"""The public place of what users import for Ray:
`from trainkit.launch.ray import RayExecutor` (docs/ray.md).
"""

from typing import Any

from trainkit.extension import public


def __getattr__(name: str) -> Any:
    return public(__name__, name)
