"""export: writes a checkpoint's weights or forward to a file for other programs,
checked against the Task.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from trainkit.cli.guard import main_alone
from trainkit.cli.options import read_keys, trusted_modules
from trainkit.cli.usage import help_text
from trainkit.errors import ConfigError
from trainkit.extensions.exporting.request import FORMATS, check_format, check_output
from trainkit.extensions.exporting.usage import USAGE

_KEYS = USAGE.keys()


def main(command: str, arguments: Sequence[str]) -> int:
    """Export a checkpoint: ckpt_path=best|last|FOLDER [run_dir=...] [format=...] [output=...];
    return the exit code.
    """
    return main_alone(arguments, help_text(command, USAGE), lambda: _work(arguments))


def _work(arguments: Sequence[str]) -> None:
    """Export. torch is imported here, after all checks."""
    request = _read(arguments)
    from_run: Any = importlib.import_module("trainkit.extensions.exporting.from_run")
    from_run.export_run(**request)


def _read(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `export_run`, checked as far as possible without torch."""
    given = read_keys(arguments, _KEYS, "export")
    if "ckpt_path" not in given:
        raise ConfigError(f"ckpt_path is missing; it must be {_KEYS['ckpt_path']}.")
    name = given.get("format", "safetensors")
    check_format(name)
    if "output" in given:
        check_output(given["output"], name)
    trust = trusted_modules(given)
    return {key: given.get(key) for key in ("ckpt_path", "run_dir", "output")} | {
        "format": name,
        "trust": trust,
        "hub": _hub(given, name),
    }


def _hub(given: dict[str, str], format_name: str) -> Any:
    """Return where the folder is uploaded to; None for nowhere.

    Raises:
        ConfigError: a setting has no effect, or there is no token.
    """
    if "push_to_hub" not in given:
        if "private" in given:
            raise ConfigError(
                f"private is {given['private']}, which has no effect without push_to_hub=NAME. Set"
                " that, or leave private out."
            )
        return None
    if FORMATS[format_name][0]:
        raise ConfigError(
            f"push_to_hub is '{given['push_to_hub']}', but format={format_name} writes a file. The"
            " hub takes the folders of format=huggingface and format=peft."
        )
    private = given.get("private")
    if private not in (None, "true", "false"):
        raise ConfigError(f"private is '{private}'; it must be true or false.")
    hub: Any = importlib.import_module("trainkit.extensions.exporting.hub")
    return hub.Hub(given["push_to_hub"], None if private is None else private == "true")
