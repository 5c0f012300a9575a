"""The driver's half of the store by which torch's groups form: keys of each generation, and the
requests of store.DriverStore for them. No torch.
"""

from __future__ import annotations

import base64
import threading
from dataclasses import dataclass
from typing import Any

STORE = "/elastic/store"  # where requests go
_ACTIONS = ("set", "append", "get", "add", "check", "delete", "wait")
_WAITING = ("get", "wait")


@dataclass(frozen=True)
class Asked:
    """A request of a rank."""

    action: str  # one of _ACTIONS
    keys: tuple[str, ...]  # one at least; several of "check", "get" and "wait" alone
    value: str  # of "set" and "append" in base64; of "add" the number to add
    generation: int  # the rank's

    @classmethod
    def of(cls, content: Any) -> Asked:
        """Return a request from its JSON.

        Raises:
            KeyError, TypeError, ValueError: it is none that DriverStore sends.
        """
        keys = tuple(str(key) for key in content["keys"])
        asked = cls(str(content["action"]), keys, str(content["value"]), int(content["generation"]))
        if asked.action not in _ACTIONS or not keys:
            raise ValueError(f"action '{asked.action}' of {len(keys)} keys")
        return asked


class TorchStore:
    """Values by generation and key, in base64 as they came; a number is its decimal digits.

    Args:
        longest_s: the longest time for an answer; a rank then asks again.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._values: dict[int, dict[str, str]] = {}
        self._given_up = 0
        self._changed = threading.Condition()

    def give_up(self, generation: int) -> None:
        """Answer at once to those that wait in this generation, or will: it is incomplete."""
        with self._changed:
            self._given_up = max(self._given_up, generation)
            self._changed.notify_all()

    def forget(self, before: int) -> None:
        """Delete the values of all generations before this one."""
        with self._changed:
            for generation in [one for one in self._values if one < before]:
                del self._values[generation]

    def answer(self, asked: Asked) -> dict[str, Any]:
        """Answer a request."""
        with self._changed:
            if asked.generation <= self._given_up:
                return {"answer": "given up"}
            values = self._values.setdefault(asked.generation, {})
            if asked.action in _WAITING:
                self._changed.wait_for(
                    lambda: _has_all(values, asked.keys) or asked.generation <= self._given_up,
                    self._longest_s,
                )
                if asked.generation <= self._given_up:
                    return {"answer": "given up"}
            return {"answer": "done", "value": self._do(values, asked)}

    def _do(self, values: dict[str, str], asked: Asked) -> Any:
        key = asked.keys[0]
        if asked.action == "set":
            values[key] = asked.value
        elif asked.action == "append":
            whole = base64.b64decode(values.get(key, "")) + base64.b64decode(asked.value)
            values[key] = base64.b64encode(whole).decode()
        elif asked.action == "add":
            before = int(base64.b64decode(values[key])) if key in values else 0
            values[key] = base64.b64encode(b"%d" % (before + int(asked.value))).decode()
        elif asked.action == "get":
            is_there = _has_all(values, asked.keys)
            return [values[key] for key in asked.keys] if is_there else None
        elif asked.action == "delete":
            return values.pop(key, None) is not None
        else:
            return _has_all(values, asked.keys)
        self._changed.notify_all()
        return values[key]


def _has_all(values: dict[str, str], keys: tuple[str, ...]) -> bool:
    # the last first: it is likely to come last, and each value wakes all that wait
    return all(key in values for key in reversed(keys))
