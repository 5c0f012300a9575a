"""How long a job has run, as each cluster's jobs show it."""

from __future__ import annotations

from datetime import timedelta


def elapsed_of(seconds: float) -> str:
    """Return a duration as Slurm writes it: 7:05, 1:07:05, 2-01:07:05."""
    whole = timedelta(seconds=max(0, round(seconds)))
    hours, rest = divmod(whole.seconds, 3600)
    minutes, left = divmod(rest, 60)
    if whole.days:
        return f"{whole.days}-{hours:02d}:{minutes:02d}:{left:02d}"
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"
