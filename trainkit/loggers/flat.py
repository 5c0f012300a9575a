"""A run's settings as one table: dotted names, plain values; for tools that know no nesting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Plain = bool | int | float | str


def flatten(settings: Mapping[str, Any]) -> dict[str, Plain]:
    """Return {"optimizer.lr": 0.1, ...}. A list is its JSON text; null is "null"; any other object is its text."""
    flat: dict[str, Plain] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{name}.{inner}": found for inner, found in flatten(value).items()}
        elif isinstance(value, (bool, int, float, str)):
            flat[str(name)] = value
        else:
            flat[str(name)] = json.dumps(value, default=str)
    return flat
