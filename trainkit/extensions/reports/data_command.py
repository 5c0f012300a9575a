"""data check: reads every sample of a config's data once, in parallel, and lists those that cannot
be loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainkit.cli import run
from trainkit.cli.as_json import facts_printed, split_json
from trainkit.cli.guard import fail
from trainkit.cli.options import count
from trainkit.cli.usage import help_text
from trainkit.errors import ConfigError
from trainkit.extensions.reports.usage import DATA_CHECK
from trainkit.extensions.script.own_options import split_own
from trainkit.launch.environment import read_launcher

if TYPE_CHECKING:
    from trainkit.config.compose import ComposedJob

_OWN = ("stage", "workers")
_STAGES = ("fit", "test", "predict")


def main(command: str, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    launcher = read_launcher()
    argv, as_json = split_json(arguments)
    own, rest = split_own(argv, _OWN)
    if "-h" in rest or "--help" in rest:
        print(help_text(command, DATA_CHECK))
        return 0
    try:
        stage = own.get("stage", "fit")
        if stage not in _STAGES:
            raise ConfigError(f"stage is '{stage}'; it must be one of {', '.join(_STAGES)}.")
        workers = count("workers", own["workers"], least=0) if "workers" in own else None
    except ConfigError as error:
        return fail(error, launcher, str(error), error.exit_code)

    def work(job: ComposedJob) -> None:
        """Check the job's data. torch is imported here, after all checks."""
        check: Any = importlib.import_module("trainkit.extensions.reports.data_check")
        check.check_data(job.config, stage, workers, facts)

    with facts_printed(as_json) as facts:
        return run.main("fit", rest, work, launcher)
