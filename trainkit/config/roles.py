"""What the classes that a config names say of themselves.
Their sources are read, and nothing is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.config.signature import class_attribute
from trainkit.engine.select import auto_engine

_AUTO = f"{auto_engine.__module__}.{auto_engine.__qualname__}"


def declared_engine(config: Mapping[str, Any]) -> str:
    """Return the name of a config's engine:
    "auto" for that of the launcher, "" for a class that says none.
    """
    target = (config.get("engine") or {}).get("_target_", _AUTO)
    return "auto" if target == _AUTO else _said(target, "name")


def role_of(node: Any) -> str:
    """Return the role of a node's class (Callback.role), or ""."""
    return _said(node.get("_target_"), "role") if isinstance(node, Mapping) else ""


def roles_of(config: Mapping[str, Any]) -> frozenset[str]:
    """Return the roles of a config's callbacks."""
    return frozenset(map(role_of, (config.get("callbacks") or {}).values())) - {""}


def _said(target: Any, name: str) -> str:
    said = class_attribute(target, name) if isinstance(target, str) else None
    return said if isinstance(said, str) else ""
