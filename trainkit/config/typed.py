"""What only the composed config and the words of the command line show together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.errors import ConfigError, did_you_mean

_VARS = "++vars."  # as the command line's `vars.` is passed to Hydra


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


def refuse_unread_vars(held: Mapping[str, Any], text: str, overrides: Sequence[str]) -> None:
    """Refuse a typed `vars.NAME` that no interpolation of the config reads, as a mistyped one.

    Args:
        held: vars of the config.
        text: the config as YAML, its interpolations not resolved.
        overrides: of the command line.
    """
    reads = re.findall(r"\$\{([^}]*)", text)
    if any(re.search(r"\bvars(?![\w.])", each) for each in reads):
        return  # all of them at once
    for override in overrides:
        if not override.startswith(_VARS):
            continue
        key, _, value = override.removeprefix("++").partition("=")
        name = key.split(".")[1]
        if not any(re.search(rf"\b{re.escape(name)}\b", each) for each in reads):
            near = did_you_mean(name, [other for other in held if other != name])
            raise ConfigError(
                f"{key} is {value}, and nothing in the config reads it: there is no"
                f" ${{vars.{name}}}.{near} To record it all the same: +{key}={value}"
            )
