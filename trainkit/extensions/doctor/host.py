"""This host: cores, memory, shared memory, limits, disk;
and a suitable number of loader workers.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainkit.extension import Finding
from trainkit.extensions.doctor.software import TorchSeen

AREA = "this host"
_GIB = 2**30
_MIB = 2**20
_LEAST_FILES = 4096
_LEAST_SHM_GIB = 1.0
_LEAST_DISK_GIB = 5.0
_MOST_WORKERS = 8


def look(torch: TorchSeen) -> Iterator[Finding]:
    """Yield the findings."""
    cores = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    usable = min(allowed, max(1, int(quota))) if quota else allowed
    yield Finding(AREA, "system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    limited = f", of which this process may use {usable}" if usable < cores else ""
    yield Finding(AREA, "cores", f"{cores}{limited}")
    if quota and allowed > quota:
        why = (
            f"The container may use {quota:g} cores, but each process sees {allowed} and starts too"
            " many threads."
        )
        yield Finding(
            AREA,
            "threads",
            f"{allowed} for {quota:g} cores",
            "warning",
            why,
            f"export OMP_NUM_THREADS={max(1, int(quota))}",
        )
    yield Finding(AREA, "memory", _memory())
    yield _workers(usable, torch.gpus)
    yield _shared_memory(Path("/dev/shm"))
    yield _open_files(resource.getrlimit(resource.RLIMIT_NOFILE))
    yield _disk(Path.cwd(), "disk here")
    yield _disk(Path(tempfile.gettempdir()), "disk for temporary files")


def _cpu_quota() -> float | None:
    """Return the cores that the control group allows, or None for all."""
    try:
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError):
        return None


def _memory() -> str:
    sizes = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) / 2**20
    text = f"{sizes['MemTotal']:.0f} GiB, {sizes['MemAvailable']:.0f} GiB available"
    limit = _memory_limit()
    return text if limit is None else f"{text}; this container may use {limit:.0f} GiB"


def _memory_limit() -> float | None:
    """Return the GiB that the control group allows, or None for all."""
    try:
        most = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return None if most == "max" else int(most) / _GIB
    except (OSError, ValueError):
        return None


def _workers(cores: int, gpus: int) -> Finding:
    ranks = max(1, gpus)
    workers = max(0, min(_MOST_WORKERS, cores // ranks - 1))
    of = f"{ranks} ranks" if gpus else "one rank"
    if gpus and cores < 2 * gpus:
        why = f"{cores} cores feed {gpus} GPUs: loading and decoding will slow them down."
        return Finding(
            AREA,
            "loader workers",
            f"{workers} each for {of}",
            "warning",
            why,
            "Request more cores; decode ahead of time.",
        )
    return Finding(
        AREA,
        "loader workers",
        f"data.num_workers={workers} suits {of} here; trainkit timeline shows waits",
    )


def _shared_memory(place: Path) -> Finding:
    if not place.is_dir():
        why = "Loader workers pass batches through it."
        return Finding(
            AREA, "shared memory", "none", "wrong", why, "data.num_workers=0, or mount /dev/shm"
        )
    size, free = (
        value / _GIB for value in (shutil.disk_usage(place).total, shutil.disk_usage(place).free)
    )
    text = f"{size:.1f} GiB in {place}, {free:.1f} GiB free"
    if free < _LEAST_SHM_GIB:
        why = "Loader workers pass batches through it, and die with 'Bus error' if it is full."
        return Finding(
            AREA,
            "shared memory",
            text,
            "warning",
            why,
            "docker run --shm-size=8g (or --ipc=host), or data.num_workers=0",
        )
    return Finding(AREA, "shared memory", text)


def _open_files(limits: tuple[int, int]) -> Finding:
    soft, hard = limits
    shown = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        why = "Loader workers and connections to many ranks use a file each: 'Too many open files'."
        able = hard == resource.RLIM_INFINITY or hard >= _LEAST_FILES
        remedy = (
            f"ulimit -n {_LEAST_FILES}"
            if able
            else f"raise nofile to {_LEAST_FILES} in /etc/security/limits.conf"
        )
        return Finding(AREA, "open files", shown, "warning", why, remedy)
    return Finding(AREA, "open files", shown)


def _disk(place: Path, name: str) -> Finding:
    free = shutil.disk_usage(place).free / _GIB
    text = f"{free:.0f} GiB free in {place}"
    if not os.access(place, os.W_OK):
        return Finding(
            AREA,
            name,
            f"{place} cannot be written",
            "wrong",
            "Runs are written into it.",
            "cd elsewhere, or run_dir=...",
        )
    if free < _LEAST_DISK_GIB:
        why = "A few checkpoints fill it."
        return Finding(
            AREA, name, text, "warning", why, "Free some space, or run_dir=... on another disk."
        )
    return Finding(AREA, name, text)
