"""data check: reads every sample of a config's data once, in parallel, and lists those that cannot be loaded.

data tokens is in data_tokens.py, data pack in data_pack.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainkit.cli import data_pack, data_tokens, run
from trainkit.cli.guard import fail
from trainkit.cli.options import count, split_own
from trainkit.cli.usage import usage_of
from trainkit.errors import ConfigError
from trainkit.launch.environment import read_launcher

if TYPE_CHECKING:
    from trainkit.config.compose import Job

_OWN = ("stage", "workers")
_STAGES = ("fit", "test", "predict")


def main(command: str, arguments: Sequence[str]) -> int:
    """Run `data check`, `data tokens` or `data pack`; return the exit code."""
    launcher = read_launcher()
    if not launcher.is_main:
        return 0
    if not arguments or any(argument in ("-h", "--help") for argument in arguments):
        print(usage_of(command))
        return 0 if arguments else 2
    if arguments[0] == "tokens":
        return data_tokens.main(f"{command} tokens", arguments[1:], launcher)
    if arguments[0] == "pack":
        return data_pack.main(f"{command} pack", arguments[1:], launcher)
    own, rest = split_own(arguments[1:], _OWN)
    try:
        if arguments[0] != "check":
            known = f"Use check, tokens or pack; see python -m trainkit {command} --help"
            raise ConfigError(f"'{command} {arguments[0]}' is no command. {known}")
        stage = own.get("stage", "fit")
        if stage not in _STAGES:
            raise ConfigError(f"stage is '{stage}'; it must be one of {', '.join(_STAGES)}.")
        workers = count("workers", own["workers"], least=0) if "workers" in own else None
    except ConfigError as error:
        return fail(error, launcher, str(error), error.exit_code)

    def work(job: Job) -> None:
        """Check the job's data. torch is imported here, after all checks."""
        check: Any = importlib.import_module("trainkit.report.data_check")
        check.check_data(job.config, stage, workers)

    return run.main("fit", rest, work, launcher)
