"""Dotted names of earlier versions,
in configs that users wrote and in those of runs, as today's.
"""

from __future__ import annotations

from typing import Any

from trainkit import extension


def with_current_names(config: Any) -> Any:
    """Return a config, of mappings and lists,
    with each `_target_` that has moved under its name of today.
    """
    if isinstance(config, dict):
        return {key: _current(key, value) for key, value in config.items()}
    return [with_current_names(item) for item in config] if isinstance(config, list) else config


def _current(key: Any, value: Any) -> Any:
    return (
        extension.current_name(value)
        if key == "_target_" and isinstance(value, str)
        else with_current_names(value)
    )
