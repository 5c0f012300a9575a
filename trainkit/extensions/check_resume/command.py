"""check-resume: proves for a user's own Task that a killed and resumed run ends like an
uninterrupted one.

Three runs, each started as a user would: the whole run; the same, killed by SIGKILL within a step;
and one that resumes from the last checkpoint of the second. Then the first and the third are
compared (report.py).
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.cli.as_json import split_json
from trainkit.cli.guard import fail
from trainkit.cli.options import count, engine_of
from trainkit.cli.usage import help_text
from trainkit.console import plural
from trainkit.errors import ConfigError
from trainkit.extensions.check_resume.usage import USAGE
from trainkit.extensions.programs.commands import job_error
from trainkit.extensions.programs.local import launcher_of, pretend, run_job, start_with
from trainkit.extensions.script.command_line import check_script, split_script
from trainkit.extensions.script.entry import look_at
from trainkit.extensions.script.own_options import refuse_launcher, split_own
from trainkit.launch.environment import read_launcher, without_launcher

if TYPE_CHECKING:
    from trainkit.extensions.script.subject import Subject

_OWN = ("kill_at", "save_at", "steps", "ranks", "resume_engine", "keep")
_ENGINES = ("single", "horovod", "ddp", "fsdp", "deepspeed")
_MORE_STEPS = 8
_RECORDER = "trainkit.extensions.check_resume.recorder.ResumeRecorder"


@dataclass(frozen=True)
class CheckResumeRequest:
    """The command line's request; see usage.py."""

    kill_at: int
    save_at: int
    steps: int | None
    ranks: tuple[int, int]
    engine: str | None
    keep: bool


@dataclass(frozen=True)
class ResumeRuns:
    """How the three runs are started.

    Attributes:
        subject: the fit.
        engines: as launchers know them, before and after the kill.
        settings: of the Trainer, before and after the kill.
        recorder: the recorder's settings of all runs.
        folder: of the three runs.
    """

    subject: Subject
    engines: tuple[str, str]
    settings: tuple[dict[str, Any], dict[str, Any]]
    recorder: dict[str, Any]
    folder: Path

    def start(
        self, name: str, what: str, ranks: int, run_dir: str, own: dict[str, Any], kind: str = ""
    ) -> None:
        """Run one run to its end.

        Args:
            name: of its record.
            what: it is, for messages.
            ranks: their number.
            run_dir: its folder's name.
            own: the recorder's further settings.
            kind: "dies" or "resumes".

        Raises:
            ConfigError: the run rejected its config.
            EngineError: the run failed, or should have been killed and was not.
        """
        print(f"{what}, {plural(ranks, 'rank')} ...", end=" ", flush=True)
        started = time.monotonic()
        log = self.folder / f"{name}.log"
        after = kind == "resumes"
        recorder = {"_target_": _RECORDER, "record_to": str(self.folder / "notes" / name)}
        changes: Any = importlib.import_module("trainkit.extensions.script.changes")
        changed = changes.Changes(
            str(self.folder / run_dir),
            self.settings[after],
            {"check_resume": {**recorder, **self.recorder, **own}},
            ckpt_path="last" if after else None,
            checkpoints_to=str(self.folder / run_dir / "kept-by"),
        )
        engine = self.engines[after]
        line = [
            *start_with(launcher_of(engine), ranks, engine),
            *self.subject.line(changed, self.folder, name),
        ]
        code = run_job(line, log, without_launcher(os.environ))
        print(f"{time.monotonic() - started:.0f} s", flush=True)
        notes = (self.folder / "notes" / name).glob("rank*.jsonl")
        if kind == "dies" and any('"killed"' in path.read_text() for path in notes):
            return
        if code != 0:
            raise job_error(what, code, log)


def main(command: str, arguments: Sequence[str]) -> int:
    """Run `kill_at=17 [...]` with a config or a script;
    return 0 if nothing differs, 1 if something does.
    """
    before, script = split_script(arguments)
    if "-h" in before or "--help" in before:
        print(help_text(command, USAGE))
        return 0
    started = read_launcher()
    argv, as_json = split_json(before)
    own, left = split_own(argv, _OWN)
    try:
        refuse_launcher(command, started, f"ranks={started.world_size}")
        if script is not None:
            needed = "" if "kill_at" in own else "kill_at"
            check_script(command, script, left, _OWN, needed)
        asked = _read(own, left)
    except ConfigError as error:
        return fail(error, started, str(error), error.exit_code)
    equal = [True]

    def work(subject: Subject, facts: dict[str, Any]) -> None:
        equal[0] = _check(subject, asked, facts)

    # the fit is checked for the ranks of the runs
    launcher = launcher_of(engine_of(left))
    code = look_at(
        command,
        left,
        script,
        _OWN,
        work,
        started,
        as_json,
        lambda: pretend(asked.ranks[0], asked.ranks[0], launcher),
    )
    return code or int(not equal[0])


def _read(own: dict[str, str], rest: Sequence[str]) -> CheckResumeRequest:
    if "-m" in rest or "--multirun" in rest:
        raise ConfigError("check-resume takes one config: leave -m out.")
    if "kill_at" not in own:
        raise ConfigError(
            "kill_at is missing; it must be the step in which a run is killed, for example"
            " kill_at=17."
        )
    kill_at = count("kill_at", own["kill_at"], 2)
    save_at = count("save_at", own["save_at"], 1) if "save_at" in own else max(1, kill_at - 2)
    if save_at >= kill_at:
        raise ConfigError(
            f"save_at is {save_at}; it must be less than kill_at={kill_at}: a killed run saves"
            " nothing."
        )
    steps = count("steps", own["steps"], 1) if "steps" in own else None
    if steps is not None and steps <= kill_at:
        raise ConfigError(
            f"steps is {steps}; it must be more than kill_at={kill_at}, or no step is left for the"
            " resumed run."
        )
    ranks = [count("ranks", text) for text in own.get("ranks", "1").split(",")]
    if len(ranks) > 2:
        raise ConfigError(
            f"ranks is '{own['ranks']}'; it must be one number, or two: before the kill and"
            " after it."
        )
    keep = own.get("keep", "false").lower()
    if keep not in ("true", "false"):
        raise ConfigError(f"keep is '{keep}'; it must be true or false.")
    engine = own.get("resume_engine")
    if engine is not None and engine not in _ENGINES:
        raise ConfigError(f"resume_engine is '{engine}'; it must be one of {', '.join(_ENGINES)}.")
    if engine == "single" and ranks[-1] > 1:
        raise ConfigError(
            f"resume_engine is 'single', and ranks is '{own['ranks']}'; give one rank after the"
            f" kill: ranks={ranks[0]},1"
        )
    return CheckResumeRequest(
        kill_at, save_at, steps, (ranks[0], ranks[-1]), engine, keep == "true"
    )


def _check(subject: Subject, asked: CheckResumeRequest, facts: dict[str, Any]) -> bool:
    """Run the three runs and compare; return whether they are equal.
    torch is imported here, after all checks.
    """
    steps = _last_step(subject, asked)
    engine = _engine(subject, asked)
    resume: Any = importlib.import_module("trainkit.extensions.check_resume.report")
    same: dict[str, Any] = {}
    if asked.ranks[0] != asked.ranks[1]:
        with tempfile.TemporaryDirectory() as plan:  # temporary
            same = resume.same_problem(subject, plan, asked.ranks[1])
        shown = (f"{subject.key(name)}={_text(value)}" for name, value in same.items())
        print(
            "Set in all runs, to keep the problem the same at another number of ranks:"
            f" {' '.join(shown)}"
        )
    if subject.note:
        print(subject.note, flush=True)
    folder = Path(tempfile.mkdtemp(prefix="trainkit-check-resume-"))
    equal = False
    try:
        fixed = {**same, "max_steps": steps}
        other = {**fixed, "engine": asked.engine} if asked.engine else fixed
        children = ResumeRuns(
            subject,
            (engine, asked.engine or engine),
            (fixed, other),
            {"end_at": steps},
            folder,
        )
        _run_three(children, asked)
        folders = (folder / "whole", folder / "killed", folder / "notes")
        runs = resume.Runs(*folders, asked.save_at, asked.kill_at, asked.ranks, asked.engine)
        facts["of"] = subject.of
        equal = bool(resume.report(runs, facts))
    finally:
        if equal and not asked.keep:
            shutil.rmtree(folder)
        else:
            facts.update({"folder": str(folder)} if facts else {})
            print(f"The runs, their output and checkpoints are in {folder}", flush=True)
    return equal


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def _run_three(children: ResumeRuns, asked: CheckResumeRequest) -> None:
    ranks = asked.ranks
    save = {"save_at": asked.save_at}
    children.start("whole", "1/3 the whole run", ranks[0], "whole", save)
    notes = (children.folder / "notes" / "whole" / "rank0.jsonl").read_text().splitlines()
    if len(notes) <= asked.kill_at:
        longer = children.subject.key("max_epochs")
        raise ConfigError(
            f"kill_at is {asked.kill_at}, but the run ends by itself after step {len(notes)}. Lower"
            f" it, or train longer: {longer}=..."
        )
    children.start(
        "killed",
        f"2/3 the run that is killed in step {asked.kill_at}",
        ranks[0],
        "killed",
        {**save, "kill_at": asked.kill_at},
        "dies",
    )
    what = "3/3 the resumed run" + (f" with engine={asked.engine}" if asked.engine else "")
    children.start("resumed", what, ranks[1], "killed", {}, "resumes")


def _last_step(subject: Subject, asked: CheckResumeRequest) -> int:
    start, limit, is_quick = subject.limits()
    if is_quick:
        raise ConfigError(
            f"{subject.key('fast_dev_run')} is set; it saves no checkpoint to resume from. Leave it"
            " out."
        )
    if start in ("last", "best"):
        raise ConfigError(
            f"ckpt_path is '{start}', but check-resume starts new runs. Leave it out, or give a"
            " path."
        )
    key = subject.key("max_steps")
    if limit is not None and asked.kill_at >= limit:
        raise ConfigError(f"kill_at is {asked.kill_at}; it must be less than {key}={limit}.")
    if limit is not None and asked.steps is not None and asked.steps > limit:
        raise ConfigError(f"steps is {asked.steps}; it must be {key}={limit} or less.")
    last = asked.steps or asked.kill_at + _MORE_STEPS
    return last if limit is None else min(last, limit)


def _engine(subject: Subject, asked: CheckResumeRequest) -> str:
    name = subject.engine_name
    if name == "single" and max(asked.ranks) > 1:
        raise ConfigError(
            f"ranks is {max(asked.ranks)}, but engine=single has one rank. Use engine=horovod or"
            " engine=ddp."
        )
    return "ddp" if name in ("ddp", "fsdp", "deepspeed") else "auto"
