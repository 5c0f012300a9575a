"""The driver's half of the store by which torch's groups form: keys of each generation, and the
requests of store.DriverStore for them. No torch.
"""

from __future__ import annotations

import base64
import threading
from typing import Any

_ACTIONS = ("set", "get", "add", "check", "delete", "wait")


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

    def answer(self, content: Any) -> dict[str, Any]:
        """Answer a request.

        Raises:
            KeyError, TypeError, ValueError: it is none that DriverStore sends.
        """
        action, keys = str(content["action"]), [str(key) for key in content["keys"]]
        generation, value = int(content["generation"]), str(content["value"])
        if action not in _ACTIONS or not keys:
            raise ValueError(f"action '{action}' of {len(keys)} keys")
        with self._changed:
            if generation <= self._given_up:
                return {"answer": "given up"}
            values = self._values.setdefault(generation, {})
            if action == "wait":
                self._changed.wait_for(
                    lambda: self._has_all(values, keys) or generation <= self._given_up,
                    self._longest_s,
                )
                if generation <= self._given_up:
                    return {"answer": "given up"}
            return {"answer": "done", "value": self._do(values, action, keys, value)}

    def _do(self, values: dict[str, str], action: str, keys: list[str], value: str) -> Any:
        key = keys[0]
        if action == "set":
            values[key] = value
        elif action == "add":
            before = int(base64.b64decode(values[key])) if key in values else 0
            values[key] = base64.b64encode(b"%d" % (before + int(value))).decode()
        elif action == "get":
            return values[key]
        elif action == "delete":
            return values.pop(key, None) is not None
        else:
            return self._has_all(values, keys)
        self._changed.notify_all()
        return values[key]

    @staticmethod
    def _has_all(values: dict[str, str], keys: list[str]) -> bool:
        return all(key in values for key in keys)
