"""check-engine: runs a few steps of a user's own Task in one process and on ranks, and compares them.

Four runs, each started as a user would: one process; two like it, with a rounding error in weights
and inputs, which show what rounding explains; and the ranks. Then their records are compared
(compare.py).
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.cli.as_json import split_json
from trainkit.cli.guard import fail
from trainkit.cli.options import count, engine_of
from trainkit.cli.usage import help_text
from trainkit.console import plural
from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.check_engine.usage import USAGE
from trainkit.extensions.programs.commands import job_error
from trainkit.extensions.programs.local import launcher_of, pretend, run_job, start_with
from trainkit.extensions.script.command_line import Script, check_script, split_script
from trainkit.extensions.script.engine_options import EngineOptions, split_engine
from trainkit.extensions.script.entry import look_at
from trainkit.extensions.script.own_options import refuse_launcher, split_own
from trainkit.launch.environment import read_launcher, without_launcher

if TYPE_CHECKING:
    from trainkit.extensions.script.subject import Subject

_OWN = ("ranks", "steps", "float64", "keep")
_RECORDER = "trainkit.extensions.check_engine.recorder.EngineRecorder"
_DISTURBED = 2
_DIFFERENT = 1
_UNCHECKED = 2
# options that messages show
_SHOWN = ("shard", "replicas", "tensor", "pipeline", "pipeline_schedule", "context", "param_dtype")
_SINGLE, _DOUBLE = "32-true", "64-true"


@dataclass(frozen=True)
class CheckEngineRequest:
    """The command line's request; see usage.py."""

    ranks: int
    steps: int
    float64: bool
    keep: bool
    engine: EngineOptions | None  # before a script


@dataclass(frozen=True)
class EngineRuns:
    """How the runs are started.

    Attributes:
        subject: the fit.
        settings: of the Trainer, in all runs.
        steps: that are recorded.
        folder: of the runs.
    """

    subject: Subject
    settings: Mapping[str, Any]
    steps: int
    folder: Path

    def start(self, name: str, what: str, ranks: int, engine: str, **changed: Any) -> None:
        """Run one run to its end.

        Args:
            name: of its record.
            what: it is, for messages.
            ranks: their number.
            engine: as launchers know it.
            changed: the recorder's further settings, and further `changes`.

        Raises:
            ConfigError: the run rejected its config.
            EngineError: it failed.
        """
        print(f"{what} ...", end=" ", flush=True)
        started = time.monotonic()
        log = self.folder / f"{name}.log"
        module: Any = importlib.import_module("trainkit.extensions.script.changes")
        recorder = {
            "_target_": _RECORDER,
            "record_to": str(self.folder / name),
            "steps": self.steps,
            **changed.pop("recorder", {}),
        }
        settings = {**self.settings, **changed.pop("settings", {})}
        changes = module.Changes(
            str(self.folder / "runs" / name),
            settings,
            {"check_engine": recorder},
            loggers="none",
            **changed,
        )
        command = start_with(launcher_of(engine), ranks, engine)
        line = [*command, *self.subject.line(changes, self.folder, name)]
        code = run_job(line, log, without_launcher(os.environ))
        print(f"{time.monotonic() - started:.0f} s", flush=True)
        if code != 0 and self._recorded(name) == ranks:
            print(f"It failed after the last step that is compared; its output: {log}", flush=True)
        elif code != 0:
            raise job_error(what, code, log)

    def _recorded(self, name: str) -> int:
        return len(list((self.folder / name).glob("rank*.pt")))


def main(command: str, arguments: Sequence[str]) -> int:
    """Run `[ranks=2] [steps=3] [...]` with a config or a script; return 0 if nothing differs, 1 if
    something does, 2 if it could not be compared.
    """
    before, script = split_script(arguments)
    if "-h" in before or "--help" in before:
        print(help_text(command, USAGE))
        return 0
    started = read_launcher()
    arguments, as_json = split_json(before)
    own, left = split_own(arguments, _OWN)
    try:
        refuse_launcher(command, started, f"ranks={started.world_size}")
        engine = None
        if script is not None:
            engine, left = split_engine(left)
            check_script(command, script, left, (*_OWN, "engine"))
        asked = _read(own, left, engine, script)
    except ConfigError as error:
        return fail(error, started, str(error), error.exit_code)
    equal = [True]

    def work(subject: Subject, facts: dict[str, Any]) -> None:
        equal[0] = _check(subject, asked, facts)

    # the fit is planned for the ranks of the run
    name = asked.engine.name if asked.engine else engine_of(left)
    code = look_at(
        command,
        left,
        script,
        _OWN,
        work,
        started,
        as_json,
        lambda: pretend(asked.ranks, asked.ranks, launcher_of(name)),
        settings={} if asked.engine is None else {"engine": asked.engine},
    )
    if code == EngineError.exit_code:
        return _UNCHECKED
    return code or (0 if equal[0] else _DIFFERENT)


def _read(
    own: dict[str, str], rest: Sequence[str], engine: EngineOptions | None, script: Script | None
) -> CheckEngineRequest:
    if "-m" in rest or "--multirun" in rest:
        raise ConfigError("check-engine takes one config: leave -m out.")
    ranks = count("ranks", own.get("ranks", "2"))
    steps = count("steps", own.get("steps", "3"))
    switches = {}
    for key in ("float64", "keep"):
        switches[key] = own.get(key, "false").lower()
        if switches[key] not in ("true", "false"):
            raise ConfigError(f"{key} is '{own[key]}'; it must be true or false.")
    return CheckEngineRequest(
        ranks, steps, switches["float64"] == "true", switches["keep"] == "true", engine
    )


def _check(subject: Subject, asked: CheckEngineRequest, facts: dict[str, Any]) -> bool:
    """Run the runs and compare; return whether the ranks train as one process does. torch is imported
    here, after all checks.
    """
    _check_request(subject, asked)
    module: Any = importlib.import_module("trainkit.extensions.check_engine.problem")
    with tempfile.TemporaryDirectory() as plan:  # temporary
        problem = module.problem_of(subject, plan, asked.ranks)
    if problem.batch_size is not None and not subject.nodes:
        raise ConfigError(
            "sync_batchnorm takes statistics over the samples of all ranks, so one process needs"
            f" batches of {problem.batch_size}, and the loader of {subject.of} makes its own. Check"
            " it as a config (conf=NAME), or without sync_batchnorm."
        )
    if subject.note:
        print(subject.note, flush=True)
    settings = _settings(subject, asked, problem)
    folder = Path(tempfile.mkdtemp(prefix="trainkit-check-engine-"))
    equal = False
    try:
        equal = _run_and_compare(
            EngineRuns(subject, settings, asked.steps, folder), asked, problem, facts
        )
    finally:
        if equal and not asked.keep:
            shutil.rmtree(folder)
        else:
            facts.update({"folder": str(folder)} if facts else {})
            print(f"The runs, their output and records are in {folder}", flush=True)
    return equal


def _run_and_compare(
    children: EngineRuns, asked: CheckEngineRequest, problem: Any, facts: dict[str, Any]
) -> bool:
    """Run and compare; again in float64 if float32 leaves a doubt."""
    subject = children.subject
    show: Any = importlib.import_module("trainkit.extensions.check_engine.report")
    error = _error(children)
    shown = _engine_text(subject)
    _run_all(children, asked, problem, error)
    result = show.compared(children.folder, _DISTURBED, error)
    if result.is_doubtful and children.settings.get("precision", _precision(subject)) == _SINGLE:
        print(
            f"{result.first.name} differs by {result.first.relative:.1g} in {result.first.stage}: a"
            " rounding error that passes a kink (ReLU, a maximum) can do that. Again in float64:",
            flush=True,
        )
        folder = children.folder / "float64"
        folder.mkdir()
        children = replace(
            children, settings={**children.settings, "precision": _DOUBLE}, folder=folder
        )
        error = _error(children)
        _run_all(children, asked, problem, error)
        result = show.compared(folder, _DISTURBED, error)
    if result.steps < asked.steps:
        print(
            f"The run ends by itself after {plural(result.steps, 'step')}: no more are compared.",
            flush=True,
        )
    facts |= {"of": subject.of, "engine": shown, "ranks": asked.ranks}
    what = show.checked_run(subject.of, shown, asked.ranks)
    return bool(show.report(result, what, facts))


def _precision(subject: Subject) -> str:
    return str(subject.requested.options.numerics.precision)


def _error(children: EngineRuns) -> float:
    module: Any = importlib.import_module("trainkit.extensions.check_engine.problem")
    precision = children.settings.get("precision", _precision(children.subject))
    return float(module.error_of(precision, children.subject.engine.get("param_dtype")))


def _check_request(subject: Subject, asked: CheckEngineRequest) -> None:
    name = subject.engine_name
    if asked.ranks == 1 and name in ("auto", "single", "horovod", "ddp"):
        raise ConfigError(
            f"ranks is 1 with engine={name}: that is one process, and nothing to compare. Give"
            " ranks=2, or an engine that splits weights: engine=fsdp."
        )
    if name == "single":
        raise ConfigError(
            f"ranks is {asked.ranks}, but engine=single has one rank. Use engine=ddp, engine=fsdp"
            " or engine=horovod."
        )
    if name == "deepspeed":
        raise ConfigError(
            "engine=deepspeed keeps its gradients to itself, so they could not be compared. Check"
            " engine=fsdp, which splits the same."
        )
    shared = [int(subject.engine.get(option) or 1) for option in ("tensor", "context")]
    if min(shared) > 1:
        raise ConfigError(
            f"engine.tensor is {shared[0]}, and engine.context is {shared[1]}: outputs whose widths"
            " and tokens are both parts are not compared. Check each of them alone."
        )
    start, _, is_quick = subject.limits()
    if is_quick:
        raise ConfigError(
            f"{subject.key('fast_dev_run')} is set, and steps={asked.steps} are compared. Leave it"
            " out."
        )
    if start in ("last", "best", "auto"):
        raise ConfigError(
            f"ckpt_path is '{start}', but check-engine starts new runs. Leave it out, or give a"
            " path."
        )


def _settings(subject: Subject, asked: CheckEngineRequest, problem: Any) -> dict[str, Any]:
    _, limit, _ = subject.limits()
    settings = {
        **problem.settings,
        "max_steps": asked.steps if limit is None else min(asked.steps, limit),
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
    }
    if subject.requested.options.numerics.compile:
        settings["compile"] = False
        print("compile is off in all runs: outputs of compiled modules are not seen.", flush=True)
    own = _precision(subject)
    if asked.float64:
        settings["precision"] = _DOUBLE
    elif own not in (_SINGLE, _DOUBLE):
        settings["precision"] = _SINGLE
        print(
            f"{subject.key('precision')} is {_SINGLE} in all runs: the rounding of {own} would hide"
            " what is to be seen.",
            flush=True,
        )
    return settings


def _run_all(children: EngineRuns, asked: CheckEngineRequest, problem: Any, error: float) -> None:
    whole = {"settings": {"engine": "single"}, "batch_size": problem.batch_size}
    last = _DISTURBED + 2
    what = f"one process, {plural(asked.steps, 'step')} of {plural(problem.samples, 'sample')}"
    children.start("alone", f"1/{last} {what}", 1, "single", **whole)
    for i in range(1, _DISTURBED + 1):
        children.start(
            f"disturbed-{i}",
            f"{i + 1}/{last} one process, disturbed by rounding",
            1,
            "single",
            recorder={"disturb": i, "size": error},
            **whole,
        )
    subject = children.subject
    children.start(
        "ranks",
        f"{last}/{last} {_engine_text(subject)}, {plural(asked.ranks, 'rank')}",
        asked.ranks,
        subject.engine_name,
        recorder={"reference": str(children.folder / "alone")},
        settings={} if asked.engine is None else {"engine": asked.engine.as_setting()},
    )


def _engine_text(subject: Subject) -> str:
    own = {name: subject.engine.get(name) for name in _SHOWN}
    shown = [
        f"engine.{name}={value}" for name, value in own.items() if value not in (None, 1, "1f1b")
    ]
    name = subject.engine_name or "your own"
    if name == "auto":
        name = "horovod" if launcher_of(name) == "horovodrun" else "ddp"
    return " ".join([f"engine={name}", *shown])
