"""Moments that later processes can compare, whatever is done to the clock in between.
Imports no torch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path


def boot_id() -> str:
    """Return an id of this host's boot, "" if unknown:
    processes of one boot share their monotonic clock.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Moment:
    """A moment, by both clocks of a host."""

    unix_s: float
    monotonic_s: float
    boot: str

    @classmethod
    def now(cls) -> Moment:
        """Return the present one."""
        return cls(time.time(), time.monotonic(), boot_id())

    def seconds_since(self, earlier: Moment) -> float:
        """Return the seconds between two moments:
        by the monotonic clock of one boot, else by the time of day, at least 0.
        """
        if self.boot and self.boot == earlier.boot:
            return self.monotonic_s - earlier.monotonic_s
        return max(0.0, self.unix_s - earlier.unix_s)
