"""The end of groups of Gloo, beside what follows it.

Gloo's threads, one a group or more, ask every 10 ms whether they are to end (torch 2.15), and a
group's destructor waits for them: 14 ms and more, of which a rank that has lost another one need
not wait for any. Torch releases Python's lock in that destructor. Groups of NCCL end first: they
hold memory of the GPU.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from trainkit.safety.threads import printed, start_thread

_AT_EXIT_S = 5.0  # a group whose sum still waits for a rank may take half an hour
_ending: list[threading.Thread] = []


def end_beside(groups: list[Any]) -> None:
    """Free groups in a thread, and what this list holds with them.
    The caller holds no other reference to them.
    """
    if torch.cuda.is_available():
        groups.clear()
        return
    _ending[:] = [thread for thread in _ending if thread.is_alive()]
    effect = "The connections of former ranks stay open; training continues."
    _ending.append(start_thread("end-groups", groups.clear, printed(effect)))


def wait_for_endings() -> None:
    """Wait for the groups that are ending: the interpreter ends next."""
    for thread in _ending:
        thread.join(_AT_EXIT_S)
