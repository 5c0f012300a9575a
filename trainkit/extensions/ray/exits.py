"""The exit code of a rank that ends its own process: Ray reports none, so the rank leaves it in the
cluster's store.

What ends a process from outside (SIGKILL, a segmentation fault) leaves no code.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.experimental import internal_kv

from trainkit.safety.threads import printed, start_thread

_EFFECT = "The driver does not learn the exit code."
_LONGEST_S = 5.0  # for the note; the process ends without it


def note_exits() -> None:
    """From here on, let this actor's process note the code of an os._exit;
    children that it forks have theirs.
    """
    key = _key(ray.get_runtime_context().get_actor_id())
    process = os.getpid()
    end = os._exit

    def noting(status: int) -> Any:
        if os.getpid() == process:
            note = start_thread(
                "exit code",
                lambda: internal_kv._internal_kv_put(key, str(status).encode()),
                printed(_EFFECT),
            )
            note.join(_LONGEST_S)
        end(status)

    os._exit = noting


def exit_code_of(actor: Any) -> int | None:
    """Return the code that an actor's process has noted, once; None if there is none."""
    key = _key(actor._actor_id.hex())
    code = internal_kv._internal_kv_get(key)
    if code is None:
        return None
    internal_kv._internal_kv_del(key)
    return int(code)


def _key(actor_id: str | None) -> bytes:
    return f"trainkit exit code of {actor_id}".encode()
