"""replay: runs a step again from its capsule, and reports non-finite values."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainkit.cli.as_json import facts_printed, split_json
from trainkit.cli.guard import main_alone
from trainkit.cli.usage import help_text
from trainkit.errors import ConfigError, did_you_mean
from trainkit.extensions.capsule.usage import USAGE

_KEYS = USAGE.keys()
_PARTS = ("task", "trainer", "seed")  # parts of the config that may be overridden


def main(command: str, arguments: Sequence[str]) -> int:
    """Replay a step: CAPSULE [key=value ...]; return the exit code."""
    argv, as_json = split_json(arguments)
    with facts_printed(as_json) as facts:
        return main_alone(argv, help_text(command, USAGE), lambda: _work(argv, facts))


def _work(arguments: Sequence[str], facts: dict[str, Any]) -> None:
    """Replay the step and print the results. torch is imported here, after all checks."""
    request = _read(arguments)
    replaying: Any = importlib.import_module("trainkit.extensions.capsule.replay")
    show: Any = importlib.import_module("trainkit.extensions.capsule.show")
    done = replaying.replay(**request)
    show.show(done)
    facts |= show.facts_of(done)


def _read(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `replay`, checked as far as possible without torch."""
    folders = [argument for argument in arguments if _key_of(argument) is None]
    if len(folders) != 1:
        what = (
            "No capsule is given."
            if not folders
            else f"{len(folders)} capsules are given ({', '.join(folders)})."
        )
        raise ConfigError(
            f"{what} Give one: python -m trainkit replay runs/mine/capsules/step=N-rank=R"
        )
    request: dict[str, Any] = {"capsule": folders[0]}
    overrides = []
    for argument in arguments:
        key = _key_of(argument)
        value = argument.partition("=")[2]
        if key is None:
            continue
        if key in request:
            raise ConfigError(f"{key} is given twice. Leave one out.")
        if key in ("update", "pdb"):
            if value not in ("true", "false"):
                raise ConfigError(f"{key} is '{value}'; it must be true or false.")
            request[key] = value == "true"
        elif key in _KEYS:
            modules = [
                module.strip(" '\"") for module in value.strip("[]").split(",") if module.strip()
            ]
            request[key] = modules if key == "trust" else value
        else:
            overrides.append(argument)
    return request | {"overrides": _parsed(overrides)}


def _key_of(argument: str) -> str | None:
    """Return the key of a setting; None for a folder, which has a "=" in its name too
    (step=N-rank=R).

    Raises:
        ConfigError: the setting is unknown.
    """
    key, equals, _ = argument.partition("=")
    if not equals or "/" in key or key.startswith("step") or Path(argument).exists():
        return None
    if key in _KEYS or key.split(".")[0] in _PARTS:
        return key
    raise ConfigError(
        f"'{key}' is no setting of replay.{did_you_mean(key, _KEYS)} Use {', '.join(_KEYS)}, or"
        " task.X and trainer.X of the run's config."
    )


def _parsed(overrides: Sequence[str]) -> dict[str, Any]:
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)))
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{' '.join(overrides)}: {str(error).splitlines()[0]}") from error
    assert isinstance(parsed, dict)
    return {str(key): value for key, value in parsed.items()}
