"""data check: reads every sample of a config's data once, in parallel, and lists those that cannot
be loaded.

Its other parts are commands of extensions: data tokens, data pack.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainkit.cli import run
from trainkit.cli.as_json import facts_printed, split_json
from trainkit.cli.commands import command_of, find_usage, parts_of
from trainkit.cli.guard import fail
from trainkit.cli.options import count, split_own
from trainkit.cli.usage import help_text, usage_of
from trainkit.errors import ConfigError, did_you_mean
from trainkit.extension import resolve
from trainkit.launch.environment import read_launcher

if TYPE_CHECKING:
    from trainkit.config.compose import ComposedJob

_OWN = ("stage", "workers")
_STAGES = ("fit", "test", "predict")


def _help(command: str) -> str:
    """Return the help of `data check` and of each part that an extension brings."""
    parts = {f"{command} {part}": find_usage(f"{command} {part}") for part in parts_of(command)}
    return "\n".join(
        (
            usage_of(command),
            *(help_text(name, usage) for name, usage in parts.items() if usage is not None),
        )
    )


def main(command: str, arguments: Sequence[str]) -> int:
    """Run `data check`, or the part of an extension, as `data pack`; return the exit code."""
    launcher = read_launcher()
    if not launcher.is_main:
        return 0
    part = arguments[0] if arguments else "--help"
    if part in ("-h", "--help"):
        print(_help(command))
        return 0 if arguments else 2
    words, as_json = split_json(arguments[1:])
    own, rest = split_own(words, _OWN)
    try:
        brought = command_of(f"{command} {part}")
        if brought is None and part != "check":
            known = ", ".join(("check", *parts_of(command)))
            raise ConfigError(
                f"'{command} {part}' is not a"
                f" command.{did_you_mean(part, ('check', *parts_of(command)))} Use {known}; see"
                f" python -m trainkit {command} --help"
            )
        if brought is not None:
            code: int = resolve(brought.main)(f"{command} {part}", arguments[1:])
            return code
        if "-h" in rest or "--help" in rest:
            print(usage_of(command))
            return 0
        stage = own.get("stage", "fit")
        if stage not in _STAGES:
            raise ConfigError(f"stage is '{stage}'; it must be one of {', '.join(_STAGES)}.")
        workers = count("workers", own["workers"], least=0) if "workers" in own else None
    except ConfigError as error:
        return fail(error, launcher, str(error), error.exit_code)

    def work(job: ComposedJob) -> None:
        """Check the job's data. torch is imported here, after all checks."""
        check: Any = importlib.import_module("trainkit.report.data_check")
        check.check_data(job.config, stage, workers, facts)

    with facts_printed(as_json) as facts:
        return run.main("fit", rest, work, launcher)
