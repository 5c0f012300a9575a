"""export: writes a checkpoint's weights or forward to a file for other programs, checked against the Task."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from trainkit.cli import run
from trainkit.cli.options import module_names, read_keys
from trainkit.errors import ConfigError
from trainkit.export.request import FORMATS, check_format, check_output

_KEYS = {
    "ckpt_path": "best, last, or a checkpoint's folder",
    "run_dir": "the run of best and last; default: the newest one in runs/",
    "format": f"one of {', '.join(FORMATS)}; default: safetensors",
    "output": "the file; default: <run_dir>/export/<conf> with the format's suffix",
    "trust": "modules that the run's config may name in addition to the allowed ones: [my.module]",
}


def main(command: str, arguments: Sequence[str]) -> int:
    """Export a checkpoint: ckpt_path=best|last|FOLDER [run_dir=...] [format=...] [output=...]; return the exit code."""
    keys = "\n".join(f"  {key:<11}{text}" for key, text in _KEYS.items())
    usage = f"usage: python -m trainkit {command} ckpt_path=best|last|FOLDER [key=value ...]\n\n{keys}"
    return run.main_alone(arguments, usage, lambda: _work(arguments))


def _work(arguments: Sequence[str]) -> None:
    """Export. torch is imported here, after all checks."""
    request = _read(arguments)
    from_run: Any = importlib.import_module("trainkit.export.from_run")
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
    trust = module_names(given.get("trust", ""))
    return {key: given.get(key) for key in ("ckpt_path", "run_dir", "output")} | {"format": name, "trust": trust}
