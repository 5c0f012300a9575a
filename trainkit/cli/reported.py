"""Which rank prints an error that all ranks of a host have: the first one, though they may be seconds apart."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
import time
from pathlib import Path

_FRESH_S = 60.0
# Together they name a job, and its attempt.
_JOB = [
    *("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
]


def is_first(text: str) -> bool:
    """Return whether no other rank of this job on this host has reported this text within the last minute; note it."""
    job = [os.environ.get(name, "") for name in _JOB]
    key = hashlib.sha256("\0".join([*job, text]).encode(errors="replace")).hexdigest()
    path = Path(tempfile.gettempdir(), f"trainkit-{os.getuid()}-reported")
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return True
    with os.fdopen(file, "r+") as notes:
        fcntl.flock(notes, fcntl.LOCK_EX)
        now = time.time()
        found = re.findall(r"^(\d{1,12}) (\w{64})$", notes.read(), re.MULTILINE)
        fresh = [(at, other) for at, other in found if abs(now - int(at)) < _FRESH_S]
        if any(other == key for _, other in fresh):
            return False
        notes.seek(0)
        notes.truncate()
        notes.writelines(f"{at} {other}\n" for at, other in [*fresh, (int(now), key)])
    return True
