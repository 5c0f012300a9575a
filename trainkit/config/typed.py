"""What only the composed config and the words of the command line show together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.errors import ConfigError


def refuse_a_new_folder(plain: Mapping[str, Any], run_dir: str) -> None:
    """Refuse `resume=auto` in a folder named after the time: it would never find anything.

    Args:
        plain: the resolved config.
        run_dir: before its interpolations are resolved.
    """
    if plain.get("resume") == "auto" and "${now:" in run_dir:
        raise ConfigError(
            "resume is 'auto', but each start has a new folder (run_dir holds the time): there"
            " would never be anything to resume from. Give the run's folder:"
            f" run_dir=runs/{plain['conf']}/mine"
        )


def refuse_trust_in_files(trust: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuse `trust` in a config file:
    it extends the allow-list, so only the command line may set it.
    """
    if trust and not any(override.lstrip("+").startswith("trust=") for override in overrides):
        raise ConfigError(
            f"trust is {list(trust)} in a config file; it may only be given on the command line:"
            " trust=[...]."
        )
