"""An engine before a script: `engine=fsdp engine.tensor=2 mine.py`, in place of the script's own.
Imports no torch.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.errors import ConfigError

_KEY = "engine"


@dataclass(frozen=True)
class EngineOptions:
    """An engine by its name, with options of its constructor."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def as_setting(self) -> dict[str, Any]:
        """Return it as plain values, for the process of a run."""
        return {"name": self.name, "options": dict(self.options)}

    def made(self) -> Any:
        """Make the engine.

        Raises:
            ConfigError: there is no such engine or option, or its package is missing.
        """
        select: Any = importlib.import_module("trainkit.engine.select")
        return select.make_engine(self.name, **self.options)


def split_engine(arguments: Sequence[str]) -> tuple[EngineOptions | None, list[str]]:
    """Return the engine among arguments before a script, None if there is none; and the others.

    Raises:
        ConfigError: there are options of an engine, and no name.
    """
    pairs = [(word, *word.partition("=")[::2]) for word in arguments]
    own = [(key, text) for word, key, text in pairs if "=" in word and _is_own(key)]
    left = [word for word, key, _ in pairs if not ("=" in word and _is_own(key))]
    if not own:
        return None, left
    given = dict(own)
    if not given.get(_KEY):
        key = next(iter(given))
        raise ConfigError(
            f"{key}={given[key]} stands before a script, without its engine. Write it before:"
            f" engine=fsdp {key}={given[key]}"
        )
    name = given.pop(_KEY)
    return EngineOptions(name, {key[len(_KEY) + 1 :]: _value(given[key]) for key in given}), left


def _is_own(key: str) -> bool:
    return key == _KEY or key.startswith(f"{_KEY}.")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
