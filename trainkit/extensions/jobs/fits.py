"""What launchers read of the fit whose ranks they start."""

from __future__ import annotations

from typing import Any

from trainkit.launch.job_launcher import FitConfig


def stores_elsewhere(fit: FitConfig) -> bool:
    """Return whether checkpoints go to a store by URL,
    so that the nodes need not share the run's folder.
    """
    nodes = (fit.config.get("callbacks") or {}).values()
    return any("://" in str(node.get("dirpath")) for node in nodes if node)


def engine_of_ranks(*counts: Any) -> str:
    """Return the engine of torchrun's or srun's ranks,
    of which there are as many as the product of the counts; None is 1.
    """
    return "single" if all((count or 1) == 1 for count in counts) else "ddp"
