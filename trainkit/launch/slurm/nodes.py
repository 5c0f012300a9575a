"""The lists in Slurm's variables:
host names as "gpu[01-03,7],login", and tasks of each node as "2(x3),1".
"""

from __future__ import annotations

import re


def expand_hosts(text: str) -> list[str]:
    """Return the names of a host list:
    "gpu[01-03,7],login" gives gpu01, gpu02, gpu03, gpu7, login.
    """
    return [name for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) for name in _expand(item)]


def expand_tasks(text: str) -> list[int]:
    """Return the number of tasks of each node, in the nodes' order: "2(x3),1" gives 2, 2, 2, 1."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", text)
    return [int(tasks) for tasks, times in groups for _ in range(int(times or 1))]


def _expand(item: str) -> list[str]:
    before, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    inside, _, after = rest.partition("]")
    names = []
    for part in inside.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            names += [f"{before}{number:0{len(first)}d}{tail}" for tail in _expand(after)]
    return names
