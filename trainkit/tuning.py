"""The public place of what users import for searches:
`from trainkit.tuning import trial` (docs/ray.md).
"""

from typing import Any

from trainkit.extension import public


def __getattr__(name: str) -> Any:
    return public(__name__, name)
