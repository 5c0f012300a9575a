"""Data: the arithmetic of a step (plan), the order of samples (order), loaders (loader),
the loop's input (feed).
"""

from typing import Any

from trainkit.extension import public


def __getattr__(name: str) -> Any:
    return public(__name__, name)
