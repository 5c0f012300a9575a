"""Where a run's checkpoints are, read from its folder without torch."""

from __future__ import annotations

from pathlib import Path

from trainkit.config.of_run import dirpaths_of, read_config


def places_of_checkpoints(run_dir: str | Path) -> list[str]:
    """Return the folders and URLs of a run's checkpoints: its own folder of them, and what its
    callbacks have as `dirpath`.

    Raises:
        ConfigError: the run's config cannot be read.
    """
    config = Path(run_dir, "config.yaml")
    others = dirpaths_of(read_config(config)) if config.is_file() else []
    return [str(Path(run_dir, "checkpoints")), *others]


def has_checkpoints(run_dir: str | Path) -> bool:
    """Return whether a folder is a run's with checkpoints, there or elsewhere."""
    own, *others = places_of_checkpoints(run_dir)
    return Path(own).is_dir() or bool(others)


def default_checkpoint(run_dir: str | Path) -> str:
    """Return best, or last if there is none."""
    places = places_of_checkpoints(run_dir)
    is_there = {
        name: any(Path(place, name).exists() for place in places) for name in ("best", "last")
    }
    return "last" if is_there["last"] and not is_there["best"] else "best"
