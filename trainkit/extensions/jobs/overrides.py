"""Settings as Hydra reads them at the command line,
for the command that a launcher gives its ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_][\w./:-]*")
_RESERVED = ("null", "true", "false", "nan", "inf")


def without(arguments: Sequence[str], *keys: str) -> list[str]:
    """Return a command's arguments without the overrides of these keys and of all below them."""
    given = re.compile(rf"[+~]*({'|'.join(keys)})([=.]|$)")
    return [each for each in arguments if not given.match(each)]


def override(key: str, value: Any) -> str:
    """Return a trial's value as an override of Hydra's."""
    return f"{key}={_text(value)}"


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, str) and (not _PLAIN.fullmatch(value) or value.lower() in _RESERVED):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value.item() if hasattr(value, "item") else value)  # numpy's numbers
