"""The store by which torch's groups of an elastic job form: the driver's, by signed requests.

torch's own TCPStore would do for ranks that stay. This one knows generations: a rank that waits for
another's address has an error as soon as the driver knows that it will never come, not after a
timeout of minutes, and what it sends is signed.
"""

from __future__ import annotations

import base64
import http.client
import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from trainkit.engine.collectives import PeerError
from trainkit.extensions.elastic.client import Membership
from trainkit.extensions.elastic.torch_store import STORE

_TIMEOUT_S = 300.0  # for a key, while the driver answers that it may still come
# Gloo then requests the addresses of all ranks at once, where it would wait for, and get, each one
os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")


class DriverStore(dist.Store):  # type: ignore[name-defined, misc]
    """A torch.distributed.Store of this process's generation.

    torch calls its methods, also from C++, under these names.

    Args:
        membership: of this process, with a rank.
    """

    def __init__(self, membership: Membership) -> None:
        super().__init__()
        self._link = membership.link
        self._connection = self._link.connect()
        self._lock = threading.Lock()
        self._about = {"worker": membership.worker, "generation": membership.generation}

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._do("set", [key], _in_base64(value))

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of a value."""
        self._do("append", [key], _in_base64(value))

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for several values, and return them.

        Raises:
            PeerError: a rank of this generation is gone, or the time is over.
        """
        values = self._wait("get", keys, _TIMEOUT_S)
        return [base64.b64decode(value) for value in values]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return True: several values may be requested at once."""
        return True

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first; return it."""
        return int(base64.b64decode(self._do("add", [key], str(amount))["value"]))

    def check(self, keys: list[str]) -> bool:
        """Return whether all these keys have values."""
        return bool(self._do("check", keys)["value"])

    def delete_key(self, key: str) -> bool:
        """Delete a value; return whether there was one."""
        return bool(self._do("delete", [key])["value"])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all these keys have values.

        Raises:
            PeerError: a rank of this generation is gone, or the time is over.
        """
        self._wait("wait", keys, _TIMEOUT_S if timeout is None else timeout.total_seconds())

    def clone(self) -> DriverStore:
        """Return a store of the same generation with a connection of its own."""
        other = DriverStore.__new__(DriverStore)
        dist.Store.__init__(other)  # type: ignore[attr-defined]
        other._link, other._about = self._link, self._about
        other._connection = self._link.connect()
        other._lock = threading.Lock()
        return other

    def close(self) -> None:
        """Close the connection to the driver; the next request opens it again."""
        self._connection.close()

    def _wait(self, action: str, keys: list[str], seconds: float) -> Any:
        """Return the answer to what waits for keys: as long as some lack a value, the driver has
        none.
        """
        end = time.monotonic() + seconds
        while not (value := self._do(action, keys)["value"]):
            if time.monotonic() > end:
                shown = f"{', '.join(keys[:3])}{', ...' * (len(keys) > 3)}"
                raise PeerError(f"{shown} did not come within {seconds:g} s.")
        return value

    def _do(self, action: str, keys: list[str], value: str = "") -> dict[str, Any]:
        try:
            request = self._about | {"action": action, "keys": keys, "value": value}
            with self._lock:  # checkpoints and copies are written in threads of their own
                answer = self._link.ask(self._connection, STORE, request)
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"The elastic driver's store did not answer: {error}") from error
        if answer["answer"] == "given up":
            raise PeerError("Another rank ended while the ranks met.")
        return answer


def _in_base64(value: str | bytes) -> str:
    content = value.encode() if isinstance(value, str) else bytes(value)
    return base64.b64encode(content).decode()
