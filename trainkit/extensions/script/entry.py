"""From the arguments of a command to the fit that it looks at: of conf=NAME, or of a script.
Imports no torch before the arguments are checked.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.cli import run
from trainkit.cli.as_json import facts_printed
from trainkit.cli.guard import guarded
from trainkit.extensions.script.command_line import Script, check_script
from trainkit.extensions.script.engine_options import EngineOptions
from trainkit.extensions.script.own_options import split_own
from trainkit.launch.environment import Launcher

Facts = dict[str, Any]

if TYPE_CHECKING:
    from trainkit.extensions.script.subject import Subject

_STARTED = time.strftime("%Y-%m-%d_%H-%M-%S")
_SUBJECT = "trainkit.extensions.script.subject"


def look_at(
    command: str,
    left: Sequence[str],
    script: Script | None,
    own: Collection[str],
    work: Callable[[Subject, Facts], None],
    launcher: Launcher,
    as_json: bool,
    prepare: Callable[[], None] = lambda: None,
    writes: bool = False,
    settings: Mapping[str, EngineOptions] | None = None,
) -> int:
    """Compose a config, or run a script up to its fit, and call `work` with that; return the exit
    code.

    Args:
        command: its name.
        left: arguments that are not the command's own: overrides of a config; of a script none.
        script: in place of a config.
        own: names of the command's own options.
        work: looks at the fit, and fills the facts that --json prints. Of a script it is called
            within `Trainer.fit`, before training.
        launcher: of this process.
        as_json: whether --json was given.
        prepare: is called before a config is composed and checked, and once a script has reached
            its fit: it simulates other ranks.
        writes: whether the command writes into a run's folder: of a script it then takes
            run_dir=FOLDER, by default runs/<script>/<time>.
        settings: {"engine": ...}: takes the place of a script's own engine.
    """
    with facts_printed(as_json) as facts:

        def with_facts(subject: Subject) -> None:
            work(subject, facts)

        if script is None:
            return _look_at_config(command, left, with_facts, launcher, prepare)
        given, left = split_own(left, ("run_dir",) if writes else ())
        folder = given.get("run_dir") or f"runs/{Path(script.path).stem}/{_STARTED}"
        own = [*own, *(["run_dir"] if writes else [])]

        def work_on_script() -> None:
            check_script(command, script, left, own)
            _look_at_script(script, folder, with_facts, prepare, settings or {})

        return guarded(work_on_script, launcher)


def _look_at_config(
    command: str,
    overrides: Sequence[str],
    work: Callable[[Subject], None],
    launcher: Launcher,
    prepare: Callable[[], None],
) -> int:
    prepare()

    def of_config(job: Any) -> None:
        subject: Any = importlib.import_module(_SUBJECT)
        work(subject.ConfigSubject(job, overrides))

    return run.main(command, overrides, of_config, launcher)


def _look_at_script(
    script: Script,
    folder: str,
    work: Callable[[Subject], None],
    prepare: Callable[[], None],
    settings: Mapping[str, EngineOptions],
) -> None:
    subject: Any = importlib.import_module(_SUBJECT)
    running: Any = importlib.import_module("trainkit.extensions.script.running")

    def look(requested: Any, _: Any) -> None:
        prepare()
        work(subject.ScriptSubject(script, requested, folder))

    def change(given: dict[str, Any]) -> dict[str, Any]:
        return given | {name: each.made() for name, each in settings.items()}

    running.run_script(script, running.FirstFit(script, look, change))
