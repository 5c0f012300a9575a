"""The faults of a storm. Each acts on a Storm and returns what it did,
or None if it cannot happen now.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.faults.storm.storm import MOST_SLOTS, Storm

Fault = Callable[[Storm], str | None]


def kill_worker(storm: Storm) -> str | None:
    """SIGKILL to a rank."""
    return _hit(storm, storm.workers, signal.SIGKILL)


def kill_loader(storm: Storm) -> str | None:
    """SIGKILL to a loader worker: its rank ends by it."""
    return _hit(storm, storm.loaders, signal.SIGKILL)


def terminate_worker(storm: Storm) -> str | None:
    """SIGTERM to a rank, as a scheduler sends it."""
    storm.has_terminated = True
    return _hit(storm, storm.workers, signal.SIGTERM)


def interrupt_worker(storm: Storm) -> str | None:
    """SIGINT to a rank."""
    storm.has_terminated = True
    return _hit(storm, storm.workers, signal.SIGINT)


def stop_worker(storm: Storm) -> str | None:
    """SIGSTOP to a rank, and SIGCONT some seconds later: less than the watchdog's time, or more."""
    host = _host(storm)
    if host is None or not (pids := storm.workers(host)):
        return None
    pid, seconds = storm.rng.choice(pids), storm.rng.uniform(0.5, 9)
    _send(pid, signal.SIGSTOP)
    storm.later(seconds, f"process {pid} continues", lambda: _send(pid, signal.SIGCONT), host)
    return f"process {pid} of host {host} for {seconds:.1f} s"


def stop_driver(storm: Storm) -> str | None:
    """SIGSTOP to the driver, and SIGCONT some seconds later."""
    seconds = storm.rng.uniform(0.5, 7)
    storm.signal(signal.SIGSTOP)
    storm.later(seconds, "the driver continues", lambda: storm.signal(signal.SIGCONT))
    return f"for {seconds:.1f} s"


def lose_host(storm: Storm) -> str | None:
    """A host loses power, and boots some seconds later; the discovery script may notice."""
    host = _host(storm)
    if host is None:
        return None
    seconds, slots = storm.rng.uniform(0.5, 5), storm.slots.get(host, 0)
    is_noticed = storm.rng.random() < 0.5 and sum(storm.slots.values()) > slots
    storm.hosts.lose(host)
    if is_noticed:
        storm.slots[host] = 0
        storm.list_hosts()

    def boot() -> None:
        storm.hosts.make(host)
        if is_noticed:
            storm.slots[host] = slots
            storm.list_hosts()

    storm.later(seconds, f"host {host} has booted", boot, host)
    return f"host {host} for {seconds:.1f} s{', and the list of hosts shows it' * is_noticed}"


def cut_link(storm: Storm) -> str | None:
    """A host's cable is pulled for some seconds."""
    host = _host(storm)
    if host is None:
        return None
    seconds = storm.rng.uniform(0.5, 9)
    storm.hosts.cut(host)
    storm.later(seconds, f"the link of host {host} is mended", lambda: storm.hosts.mend(host), host)
    return f"of host {host} for {seconds:.1f} s"


def slow_link(storm: Storm) -> str | None:
    """A host's link becomes slow for some seconds."""
    host = _host(storm)
    if host is None or not storm.hosts.slow(host):
        return None
    seconds = storm.rng.uniform(1, 5)
    storm.later(
        seconds, f"the link of host {host} is fast again", lambda: storm.hosts.quicken(host), host
    )
    return f"of host {host} for {seconds:.1f} s"


def fill_disk(storm: Storm) -> str | None:
    """The run's disk is full for some seconds."""
    if not storm.disk.is_own or storm.disk.is_full:
        return None
    storm.disk.fill()
    seconds = storm.rng.uniform(0.5, 4)
    storm.later(seconds, "the disk has room again", storm.disk.free)
    return f"for {seconds:.1f} s"


def change_slots(storm: Storm) -> str | None:
    """The list of hosts grows or shrinks by a slot."""
    hosts = [host for host in range(storm.hosts.count) if host not in storm.busy]
    total = sum(storm.slots.values())
    changes = [(host, 1) for host in hosts if total < MOST_SLOTS and storm.slots[host] < 2]
    changes += [
        (host, -1)
        for host in hosts
        if storm.has_formed and total > storm.least and storm.slots[host] > 0
    ]
    if not changes:
        return None
    host, change = storm.rng.choice(changes)
    storm.slots[host] += change
    storm.list_hosts()
    return f"host {host} has {storm.slots[host]} now"


def kill_driver(storm: Storm) -> str | None:
    """SIGKILL to the driver; the command is started again."""
    storm.signal(signal.SIGKILL, "the driver was killed")
    storm.restart()
    return ""


def restart_job(storm: Storm) -> str | None:
    """SIGTERM or SIGINT to the driver; the command is started again."""
    number = storm.rng.choice([signal.SIGTERM, signal.SIGINT])
    storm.signal(number, f"the driver got {number.name}")
    storm.restart()
    return f"by {number.name}"


def damage_checkpoint(storm: Storm) -> str | None:
    """The command ends, its newest checkpoint is damaged, and it is started again."""
    # one more may be replaced
    if len([path for path in storm.checkpoints() if path.name not in storm.damaged]) < 3:
        return None
    storm.signal(signal.SIGKILL, "the driver was killed, to damage a checkpoint")
    storm.await_end()
    newest = storm.checkpoints()[-1]
    path = storm.rng.choice(sorted(path for path in newest.iterdir() if path.stat().st_size))
    how = storm.rng.choice(["cut", "changed", "deleted"])
    _damage(path, how)
    storm.damaged.add(newest.name)
    storm.restart()
    return f"{path.name} of {newest.name} is {how}"


def _damage(path: Path, how: str) -> None:
    if how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "deleted":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)


def _host(storm: Storm) -> int | None:
    free = [host for host in range(storm.hosts.count) if host not in storm.busy]
    return storm.rng.choice(free) if free else None


def _hit(storm: Storm, find: Callable[[int], list[int]], number: signal.Signals) -> str | None:
    host = _host(storm)
    if host is None or not (pids := find(host)):
        return None
    pid = storm.rng.choice(pids)
    _send(pid, number)
    return f"process {pid} of host {host}"


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# fault -> how often it is drawn
FAULTS: dict[Fault, int] = {
    kill_worker: 6,
    kill_loader: 1,
    kill_driver: 1,
    lose_host: 3,
    terminate_worker: 3,
    interrupt_worker: 1,
    stop_worker: 3,
    stop_driver: 2,
    cut_link: 3,
    slow_link: 3,
    fill_disk: 3,
    damage_checkpoint: 2,
    change_slots: 6,
    restart_job: 1,
}
