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

from trainkit.cli import run
from trainkit.cli.guard import fail
from trainkit.cli.options import count, engine_of, split_own
from trainkit.cli.usage import help_text
from trainkit.config.roles import declared_engine, role_of
from trainkit.console import plural
from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.check_resume.usage import USAGE
from trainkit.launch.commands import first_error
from trainkit.launch.environment import pretend, read_launcher, without_launcher
from trainkit.launch.local import launcher_of, run_job, start_with

if TYPE_CHECKING:
    from trainkit.config.compose import ComposedJob

_OWN = ("kill_at", "save_at", "steps", "ranks", "resume_engine", "keep")
_ENGINES = ("single", "horovod", "ddp", "fsdp", "deepspeed")
_MORE_STEPS = 8
_SHOWN_LINES = 12
_WITNESS = "callbacks.check_resume"
_RECORDER = "trainkit.extensions.check_resume.recorder.ResumeRecorder"


@dataclass(frozen=True)
class CheckRequest:
    """The command line's request; see usage.py."""

    kill_at: int
    save_at: int
    steps: int | None
    ranks: tuple[int, int]
    engine: str | None
    keep: bool


@dataclass(frozen=True)
class Children:
    """How the three runs are started:
    their engine and settings before and after the kill, and their folder.
    """

    engines: tuple[str, str]
    overrides: tuple[list[str], list[str]]
    folder: Path

    def start(
        self, name: str, what: str, ranks: int, run_dir: str, own: Sequence[str], kind: str = ""
    ) -> None:
        """Run one run to its end.

        Raises:
            ConfigError: the run rejected its config.
            EngineError: the run failed, or should have been killed and was not.
        """
        print(f"{what}, {plural(ranks, 'rank')} ...", end=" ", flush=True)
        started, log = time.monotonic(), self.folder / f"{name}.log"
        witness = [
            f"_target_={_RECORDER}",
            f"record_to='{self.folder / 'notes' / name}'",
        ]
        settings = [
            f"run_dir='{self.folder / run_dir}'",
            *(f"{_WITNESS}.{setting}" for setting in witness),
            *own,
        ]
        after = kind == "resumes"
        engine, overrides = self.engines[after], self.overrides[after]
        line = [
            *start_with(launcher_of(engine), ranks, engine),
            "-m",
            "trainkit",
            "fit",
            *overrides,
            *settings,
        ]
        code = run_job(line, log, without_launcher(os.environ))
        print(f"{time.monotonic() - started:.0f} s", flush=True)
        notes = (self.folder / "notes" / name).glob("rank*.jsonl")
        if kind == "dies" and any('"killed"' in path.read_text() for path in notes):
            return
        if code != 0:
            fault = ConfigError if code == ConfigError.exit_code else EngineError
            raise fault(
                f"{what} failed (exit code {code}):{_last_lines(log)}\nIts full output: {log}"
            )


def _last_lines(log: Path) -> str:
    """Return the end of a run's output, and the first error,
    which a launcher's last lines can push out of sight.
    """
    lines = log.read_text(errors="replace").splitlines()
    shown, errors = lines[-_SHOWN_LINES:], first_error(lines)
    if errors and errors[0] not in (line.strip() for line in shown):
        shown = [*errors, "...", *shown]
    return "".join(f"\n  {line}" for line in shown)


def main(command: str, arguments: Sequence[str]) -> int:
    """Run `conf=NAME [overrides] kill_at=17 [...]`;
    return 0 if nothing differs, 1 if something does.
    """
    if "-h" in arguments or "--help" in arguments:
        print(help_text(command, USAGE))
        return 0
    started = read_launcher()
    own, rest = split_own(arguments, _OWN)
    try:
        if started.world_size > 1:
            raise ConfigError(
                f"check-resume starts its ranks itself: run it without {started.name}, with"
                f" ranks={started.world_size}."
            )
        asked = _read(own, rest)
    except ConfigError as error:
        return fail(error, started, str(error), error.exit_code)
    # the config is checked for the ranks of the runs
    pretend(asked.ranks[0], asked.ranks[0], launcher_of(engine_of(rest)))
    equal = [True]

    def work(job: ComposedJob) -> None:
        equal[0] = _check(job.config, asked, rest)

    return run.main(command, rest, work, started) or int(not equal[0])


def _read(own: dict[str, str], rest: Sequence[str]) -> CheckRequest:
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
    return CheckRequest(kill_at, save_at, steps, (ranks[0], ranks[-1]), engine, keep == "true")


def _check(config: dict[str, Any], asked: CheckRequest, overrides: Sequence[str]) -> bool:
    """Run the three runs and compare; return whether they are equal.
    torch is imported here, after all checks.
    """
    steps = _last_step(config, asked)
    engine = _engine(config, asked)
    resume: Any = importlib.import_module("trainkit.extensions.check_resume.report")
    same: list[str] = []
    if asked.ranks[0] != asked.ranks[1]:
        with tempfile.TemporaryDirectory() as plan:  # temporary
            same = resume.same_problem({**config, "run_dir": plan}, asked.ranks[1])
        print(
            "Set in all runs, to keep the problem the same at another number of ranks:"
            f" {' '.join(same)}"
        )
    folder = Path(tempfile.mkdtemp(prefix="trainkit-check-resume-"))
    equal = False
    try:
        fixed = [
            *overrides,
            *same,
            *_settings(config),
            f"trainer.max_steps={steps}",
            f"{_WITNESS}.end_at={steps}",
        ]
        # the resumed run takes ckpt_path only
        begun = [f"{key}=null" for key in ("resume", "init_weights") if config.get(key)]
        other = [word for word in fixed if not word.lstrip("+~").startswith("engine")] + [
            f"engine={asked.engine}"
        ]
        settings = (fixed, other if asked.engine else fixed)
        _run_three(
            Children((engine, asked.engine or engine), settings, folder),
            asked,
            ["ckpt_path=last", *begun],
        )
        folders = (folder / "whole", folder / "killed", folder / "notes")
        runs = resume.Runs(*folders, asked.save_at, asked.kill_at, asked.ranks, asked.engine)
        equal = bool(resume.report(runs))
    finally:
        if equal and not asked.keep:
            shutil.rmtree(folder)
        else:
            print(f"The runs, their output and checkpoints are in {folder}", flush=True)
    return equal


def _run_three(children: Children, asked: CheckRequest, resume: Sequence[str]) -> None:
    ranks, save = asked.ranks, f"{_WITNESS}.save_at={asked.save_at}"
    children.start("whole", "1/3 the whole run", ranks[0], "whole", [save])
    notes = (children.folder / "notes" / "whole" / "rank0.jsonl").read_text().splitlines()
    if len(notes) <= asked.kill_at:
        raise ConfigError(
            f"kill_at is {asked.kill_at}, but the run ends by itself after step {len(notes)}. Lower"
            " it, or train longer: trainer.max_epochs=..."
        )
    kill = [save, f"{_WITNESS}.kill_at={asked.kill_at}"]
    children.start(
        "killed",
        f"2/3 the run that is killed in step {asked.kill_at}",
        ranks[0],
        "killed",
        kill,
        "dies",
    )
    what = "3/3 the resumed run" + (f" with engine={asked.engine}" if asked.engine else "")
    children.start("resumed", what, ranks[1], "killed", resume, "resumes")


def _last_step(config: dict[str, Any], asked: CheckRequest) -> int:
    trainer = config["trainer"]
    if trainer.get("fast_dev_run"):
        raise ConfigError(
            "trainer.fast_dev_run is set; it saves no checkpoint to resume from. Leave it out."
        )
    if config.get("ckpt_path") in ("last", "best"):
        raise ConfigError(
            f"ckpt_path is '{config['ckpt_path']}', but check-resume starts new runs. Leave it out,"
            " or give a path."
        )
    limit = None if trainer.get("max_steps") == -1 else trainer.get("max_steps")
    if limit is not None and asked.kill_at >= limit:
        raise ConfigError(
            f"kill_at is {asked.kill_at}; it must be less than trainer.max_steps={limit}."
        )
    if limit is not None and asked.steps is not None and asked.steps > limit:
        raise ConfigError(f"steps is {asked.steps}; it must be trainer.max_steps={limit} or less.")
    last = asked.steps or asked.kill_at + _MORE_STEPS
    return last if limit is None else min(last, limit)


def _engine(config: dict[str, Any], asked: CheckRequest) -> str:
    name = declared_engine(config)
    if name == "single" and max(asked.ranks) > 1:
        raise ConfigError(
            f"ranks is {max(asked.ranks)}, but engine=single has one rank. Use engine=horovod or"
            " engine=ddp."
        )
    return "ddp" if name in ("ddp", "fsdp", "deepspeed") else "auto"


def _settings(config: dict[str, Any]) -> list[str]:
    """Return the overrides that keep the runs quiet, and their files in separate folders."""
    loggers: dict[str, Any] = config.get("logger") or {}
    tables = [name for name, node in loggers.items() if role_of(node) == "metrics_table"]
    settings = ["trainer.enable_progress_bar=false", "trainer.enable_model_summary=false"]
    settings += [f"~logger.{name}" for name in loggers if name not in tables]
    settings += [] if tables else ["logger.csv._target_=trainkit.loggers.CSVLogger"]
    for name, node in (config.get("callbacks") or {}).items():
        if role_of(node) == "checkpoints" and node.get("dirpath"):
            # not among the user's own
            settings.append(f"callbacks.{name}.dirpath='${{run_dir}}/kept-by/{name}'")
    return settings
