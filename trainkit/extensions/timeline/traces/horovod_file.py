"""Reads a rank's Horovod timeline as the sequence of operations of Horovod's thread, each with the
tensors fused into it.

Horovod writes a "process" per tensor with nested B and E events: ALLREDUCE, and within it the
activities (MEMCPY_IN_FUSION_BUFFER, GLOO_ALLREDUCE or NCCL_ALLREDUCE, MEMCPY_OUT_FUSION_BUFFER,
...). Fused tensors begin together, before the first activity of any of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from trainkit.extensions.timeline.traces.pieces import Event

_BYTES = {
    "uint8": 1,
    "int8": 1,
    "bool": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
}
_LIBRARIES = ("GLOO_", "NCCL_", "MPI_", "CCL_", "DDL_")
_NEGOTIATE = "NEGOTIATE_"
_PREFIX = re.compile(r"^(grouped_)?(allreduce|allgather|broadcast|alltoall|reducescatter)\.")


@dataclass
class Operation:
    """One operation of Horovod's thread. Times are microseconds of the host's monotonic clock."""

    kind: str  # "ALLREDUCE", "BROADCAST", ...
    start: float  # begin of the operation
    end: float = 0.0  # end of its last tensor
    names: list[str] = field(default_factory=list)  # its tensors, as they were submitted
    # bytes of all tensors; a tensor whose shape Horovod does not record counts 0
    num_bytes: int = 0
    activities: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> (start, end)

    @property
    def copy_s(self) -> float:
        """The seconds of copies to and from the fusion buffer."""
        copies = [times for name, times in self.activities.items() if "MEMCPY" in name]
        return sum(end - start for start, end in copies) / 1e6

    @property
    def wire_s(self) -> float:
        """The seconds of the collective itself, without copies to and from the fusion buffer."""
        own = [
            times
            for name, times in self.activities.items()
            if "MEMCPY" not in name and name.startswith(_LIBRARIES)
        ]
        return sum(end - start for start, end in own) / 1e6


def read_operations(events: Iterable[Event]) -> list[Operation]:
    """Return the operations of a Horovod timeline, in order; incomplete ones are left out."""
    began = 0.0
    names: dict[Any, str] = {}
    open_: dict[Any, list[tuple[str, float]]] = {}
    of_tensor: dict[Any, Operation] = {}
    operations: list[Operation] = []
    ended: set[int] = set()
    for event in events:
        phase, pid = event.get("ph"), event.get("pid")
        if (
            phase != "M"
            and not isinstance(event.get("ts"), (int, float))
            or (phase == "B" and "name" not in event)
        ):
            continue  # event of a damaged file
        if phase == "M":
            args = event.get("args", {})
            began = args.get("start_time_steady_in_micros", began)
            names[pid] = args.get("name", names.get(pid, ""))
        elif phase == "B":
            stack = open_.setdefault(pid, [])
            at = event["ts"] + began
            name = event["name"]
            stack.append((name, at))
            if name.startswith(_NEGOTIATE):
                continue
            if len(stack) == 1:
                if (
                    not operations
                    or operations[-1].activities
                    or id(operations[-1]) in ended
                    or operations[-1].kind != name
                ):
                    operations.append(Operation(name, at))
                operations[-1].names.append(_PREFIX.sub("", names.get(pid, "")))
                of_tensor[pid] = operations[-1]
            elif pid in of_tensor:
                start, end = of_tensor[pid].activities.get(name, (at, at))
                of_tensor[pid].activities[name] = min(start, at), max(end, at)
        elif phase == "E" and open_.get(pid):
            name, _ = open_[pid].pop()
            operation = of_tensor.get(pid)
            if operation is None or name.startswith(_NEGOTIATE):
                continue
            at = event["ts"] + began
            if open_[pid]:
                start, end = operation.activities.get(name, (at, at))
                operation.activities[name] = start, max(end, at)
            else:
                operation.end = max(operation.end, at)
                operation.num_bytes += _num_bytes(event.get("args", {}))
                ended.add(id(operation))
                del of_tensor[pid]
    return [operation for operation in operations if id(operation) in ended]


def _num_bytes(args: dict[str, str]) -> int:
    sizes = re.findall(r"\d+", args.get("shape", ""))
    return (
        math.prod(map(int, sizes)) * _BYTES.get(args.get("dtype", ""), 8) if "shape" in args else 0
    )
