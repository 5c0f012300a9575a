"""From the command line to one checked, resolved config. With cli/run.py the only home of Hydra and
OmegaConf.

command_line     the words typed -> a config's name, overrides, flags
hydra_node       composing; config files may not set what Hydra runs
schema           the constructors' check of the result
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml.error import MarkedYAMLError  # type: ignore[import-untyped]

from trainkit.config import schema
from trainkit.config.choices import in_force, plain_of
from trainkit.config.command_line import as_typed, find_conf, force, select_experiment, split
from trainkit.config.explain import explain
from trainkit.config.hydra_node import (
    check_hydra,
    compose,
    is_of_hydra,
    of_trial,
    plain_help,
    plain_hydra,
)
from trainkit.config.launchers import refuse_several
from trainkit.config.of_run import OVERRIDES, Primary, changes, joined, of_first_start, primary_of
from trainkit.config.pairs import check_batches, with_origin
from trainkit.config.recorded import RecordedConfig, keep, refuse_masks, without_environment
from trainkit.config.resources import conf_folders
from trainkit.config.sweep import (
    BASIC_LAUNCHER,
    Sweep,
    SweepEndedError,
    TrialRunner,
    is_basic,
    jobs_of,
    refuse_another_order,
    show_as_typed,
    sweep_settings,
)
from trainkit.config.typed import refuse_a_new_folder, refuse_trust_in_files
from trainkit.config.users_code import named_by_user
from trainkit.config.yaml_file import explain_file
from trainkit.console import plural
from trainkit.errors import ConfigError, TrainkitError
from trainkit.extension import with_current_names
from trainkit.launch.environment import job_started
from trainkit.run.goal import FOLDER
from trainkit.safety.masking import masked_arguments, masked_lines

# Hydra writes nothing: rank 0 writes the run's files, after all checks (cli/execute.py).
_QUIET = (
    "hydra.output_subdir=null",
    "hydra.run.dir=.",
    "hydra.sweep.dir=.",  # not the time: it would differ from one composed config to the next
    "hydra/job_logging=none",
)
_STARTED = time.localtime()
_PARAMS = "hydra.sweeper.params"
_NO_PARAMS = (
    "{}: a file's hydra.sweeper.params is read. On the command line write its keys themselves, with"
    " -m: optimizer.lr=0.1,0.2"
)
_FOLDERS = ("hydra.run.", "hydra.sweep.", "hydra.output_subdir=")
_SEVERAL = (
    "{} has several values. For one run of each add -m; for a list write key=[a,b]; for a string"
    " with a comma key='a,b'."
)


@dataclass(frozen=True)
class ComposedJob:
    """One job of a command.

    Attributes:
        command: "fit", "validate", "test" or "predict".
        config: resolved and checked.
        of_hydra: what Hydra would write into the run's folder: file name -> text.
        notes: differences from the config of the run in `run_dir`, if that is evaluated.
        recorded: the config for manifests, loggers and config.yaml.
    """

    command: str
    config: dict[str, Any]
    of_hydra: dict[str, str]
    notes: tuple[str, ...] = ()
    recorded: RecordedConfig | None = None

    @functools.cached_property
    def files(self) -> dict[str, str]:
        """Files for the run's folder: file name -> text. Only the rank that writes them needs
        them.
        """
        if self.recorded is None:
            return self.of_hydra
        text = OmegaConf.to_yaml(OmegaConf.create(self.recorded.config))
        return {"config.yaml": text} | self.of_hydra


def run(
    command: str,
    arguments: Sequence[str],
    is_main: bool,
    work: Callable[[ComposedJob], Mapping[str, float] | None],
    finish: Callable[[Sweep], None] | None = None,
) -> None:
    """Compose, check, and pass each job to `work`: one, or one for each combination with -m.

    Args:
        command: "fit", ...
        arguments: of the command line.
        is_main: whether this is rank 0.
        work: runs a job; returns the latest logged values.
        finish: called on rank 0 after the last of several runs. Without it, no record is made of
            them.

    Raises:
        ConfigError: a mistake in the command line or in a config.
        TrainkitError: some of several runs failed.
    """
    conf, overrides, flags = split(arguments)
    folders = conf_folders(Path.cwd())
    with tempfile.TemporaryDirectory() as scratch:
        primary = primary_of(command, conf, overrides, folders, Path(scratch))
        if primary is None:
            name = find_conf(conf, folders)
            primary = Primary(folders[0], name, name, overrides)
        start = _Start(command, primary, flags, is_main, Path(scratch))
        try:
            _run(start, work, finish)
        except (HydraException, OmegaConfBaseException) as error:
            explain(error)
        except (MarkedYAMLError, RecursionError) as error:
            explain_file(error, primary.name)


@dataclass(frozen=True)
class _Start:
    """What a command starts from."""

    command: str
    primary: Primary
    flags: list[str]
    is_main: bool
    scratch: Path  # an existing folder, deleted at the end

    @property
    def is_multirun(self) -> bool:
        return "-m" in self.flags or "--multirun" in self.flags


def _run(
    start: _Start,
    work: Callable[[ComposedJob], Mapping[str, float] | None],
    finish: Callable[[Sweep], None] | None = None,
) -> None:
    primary = start.primary
    conf_dirs = conf_folders(Path.cwd())
    own = [*_QUIET, *([] if start.is_main else ["hydra/hydra_logging=none"])]
    chosen = select_experiment(primary.overrides, primary.name, [primary.folder, *conf_dirs])
    overrides = [f"++conf={primary.conf}", *(force(override, conf_dirs) for override in chosen)]
    typed = [override for override in overrides if is_of_hydra(override)]
    for override in typed:
        if override.lstrip("+").startswith(_PARAMS) and not override.endswith("=null"):
            raise ConfigError(_NO_PARAMS.format(override.lstrip("+")))
    hydra_node = plain_hydra(primary.folder, [*own, *typed])
    if start.is_multirun:
        given = [override.lstrip("+").partition("=")[0] for override in overrides]
        # as if they were typed: a key need not be in a yaml file
        params = hydra_node["sweeper"].get("params") or {}
        overrides += [
            force(f"{key}={value}", conf_dirs) for key, value in params.items() if key not in given
        ]
        own += ["hydra.sweeper.params=null"] * bool(params)
    job = None
    composed = DictConfig({})
    # every job, before the first one runs
    jobs = _jobs(start, overrides, is_basic(hydra_node["sweeper"]))
    for checked in jobs:
        composed = compose(primary.folder, primary.name, [*own, *checked])
        check_hydra(composed, primary, [*own, *filter(is_of_hydra, checked)])
        if not start.flags or start.is_multirun:
            job = _job(start.command, composed, overrides, primary, _STARTED)
        if job is not None and start.is_multirun:
            refuse_several(job.config)
    if job is not None and not start.flags:
        work(job)
    elif start.is_multirun:
        make_job = functools.partial(_trial, start.command, overrides, primary, _STARTED)
        if job is not None and finish is not None and len(start.flags) == 1:
            sweep, more = sweep_settings(hydra_node, job.config, typed)
            if job.config.get("resume") and not sweep.returns_metric:
                refuse_another_order(sweep.folder, jobs)
            runner = TrialRunner(sweep, make_job, work, start.is_main, os.getpid())
            _run_sweep(start, runner, [*own, *more, *overrides], finish)
        else:
            _run_hydra(
                start, start.scratch, [*own, *overrides], lambda config: work(make_job(config))
            )
    elif start.is_main:
        is_job = any(flag.rpartition("=")[2] in ("job", "all") for flag in start.flags)
        refusal = _refusal(start, composed, overrides) if is_job else ""
        printed = io.StringIO()
        choices = composed.hydra.runtime.choices
        with contextlib.redirect_stdout(printed), without_environment(), in_force(choices):
            _run_hydra(start, start.scratch, [*own, *overrides], lambda config: None)
        print(masked_lines(printed.getvalue().replace("\\${", "${")), end="", flush=True)
        print(refusal, end="", file=sys.stderr)


def _refusal(start: _Start, composed: DictConfig, overrides: Sequence[str]) -> str:
    """Return a line: why the command would refuse a config that is only printed; "" if it would
    not.
    """
    try:
        try:
            _job(start.command, composed, overrides, start.primary, _STARTED)
        except (HydraException, OmegaConfBaseException) as error:
            explain(error)
    except ConfigError as error:
        return f"[{start.command}] this config would be refused: {error}\n"
    return ""


def _jobs(start: _Start, overrides: Sequence[str], is_grid: bool) -> list[list[str]]:
    """Return the overrides of each job to check; one without -m."""
    if start.is_multirun and len(start.flags) > 1:
        raise ConfigError(
            f"{' '.join(start.flags)}: -m runs several jobs, the other flag shows one. Leave one"
            " out."
        )
    for typed in filter(is_of_hydra, overrides):
        if typed.lstrip("+").startswith(_FOLDERS):
            raise ConfigError(
                f"{typed} has no effect: the folder of a run, and of several with -m, is"
                " run_dir=FOLDER, where its config is written too."
            )
        if not start.flags and not typed.startswith("hydra.searchpath="):
            raise ConfigError(f"{typed} is for several runs: add -m.")
    jobs = jobs_of(overrides, is_grid)
    if len(jobs) > 1 and not start.is_multirun:
        raise ConfigError(
            _SEVERAL.format(", ".join(o.removeprefix("++") for o in overrides if o not in jobs[0]))
        )
    return jobs


def _run_sweep(
    start: _Start, runner: TrialRunner, overrides: list[str], finish: Callable[[Sweep], None]
) -> None:
    sweep = runner.sweep
    if start.is_main:
        sweep.begin()
    logging.getLogger("alembic").setLevel(logging.WARNING)  # of optuna: it lists its plugins
    logging.getLogger(BASIC_LAUNCHER).addFilter(show_as_typed)
    ended: BaseException | None = None
    try:
        notes = sweep.folder / FOLDER if start.is_main else start.scratch
        _run_hydra(start, notes, overrides, runner.__call__)
    except SweepEndedError as error:
        ended = error.__cause__
    except ValueError:
        if not start.is_main or any(trial.state.name == "done" for trial in sweep.trials()):
            raise  # optuna raises one if no run has a value
    finally:
        if start.is_main:
            finish(sweep)
    if ended is not None:
        # outside of `except`: the errors would otherwise lead to each other in a circle
        raise ended
    # the others would read the last one's state before rank 0 writes it
    trials = sweep.trials() if start.is_main else []
    if failed := [trial for trial in trials if trial.state.name != "done"]:
        raise TrainkitError(
            f"{len(failed)} of {plural(len(trials), 'run')} failed; the table above has the errors."
        )


def _run_hydra(
    start: _Start, sweep_dir: Path, overrides: list[str], task: Callable[[DictConfig], object]
) -> None:
    """Run Hydra's own main for its flags (--cfg, --info, -m);
    `sweep_dir` is for its notes of a sweep.
    """
    GlobalHydra.instance().clear()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raises errors unchanged; _explain rewords them
    before = sys.argv
    folders = [f"hydra.sweep.dir='{sweep_dir}'", "hydra.sweep.subdir=."]
    named = f"--config-name={start.primary.name}"
    sys.argv = [before[0], named, *overrides, *folders, *start.flags]
    try:
        with plain_help() if sys.version_info >= (3, 14) else contextlib.nullcontext():
            hydra.main(version_base="1.3", config_path=str(start.primary.folder))(task)()
    finally:
        sys.argv = before


def _trial(
    command: str,
    overrides: Sequence[str],
    primary: Primary,
    started: time.struct_time,
    config: DictConfig,  # by Hydra, without the sections of the job's choices
) -> ComposedJob:
    """Return one of several jobs, perhaps in a process of its own."""
    with of_trial(primary.folder, primary.name, list(_QUIET)) as composed:
        return _job(command, composed, overrides, primary, started)


def _job(
    command: str,
    config: DictConfig,
    overrides: Sequence[str],
    primary: Primary,
    started: time.struct_time,
) -> ComposedJob:
    # One time for all jobs of a sweep, also those of other processes; Hydra would read the clock
    # for each.
    OmegaConf.register_new_resolver(
        "now", lambda pattern: time.strftime(pattern, started), replace=True
    )
    OmegaConf.clear_cache(config)
    # The launcher is a start's, and not the run's: it is in no file of the run.
    held = {key: node for key, node in plain_of(config).items() if key not in ("hydra", "launcher")}
    own = OmegaConf.create(with_current_names(held))
    choices = HydraConfig.get().runtime.choices
    check_batches(plain_of(own), choices, conf_folders(Path.cwd()))
    text = OmegaConf.to_yaml(own)
    try:
        resolved = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        schema.check_names_beside(str(error.full_key), plain_of(own))
        raise
    assert isinstance(resolved, dict)
    plain = {str(key): value for key, value in resolved.items()}
    plain.setdefault("seed", 0)
    plain.setdefault(
        "run_dir",
        f"runs/{plain['conf']}/{job_started() or time.strftime('%Y-%m-%d_%H-%M-%S', started)}",
    )
    refuse_trust_in_files(plain.get("trust") or [], overrides)
    hydra_config = HydraConfig.get()
    if hydra_config.mode is not None and hydra_config.mode.name == "MULTIRUN":
        of_run = f"{plain['run_dir']}/checkpoints/{plain.get('ckpt_path')}"
        if (
            command != "fit"
            and plain.get("ckpt_path") in ("best", "last")
            and Path(of_run).exists()
        ):
            plain["ckpt_path"] = of_run
        plain["run_dir"] = f"{plain['run_dir']}/{hydra_config.job.num}"
        overrides = list(hydra_config.overrides.task)
    refuse_a_new_folder(plain, str(plain_of(own).get("run_dir", "${now:}")))
    refuse_masks(plain)
    unused = [key for key in ("optimizer", "lr") if plain.get(key) and f"${{{key}" not in text]
    launcher = (
        with_current_names(OmegaConf.to_container(config.launcher, resolve=True))
        if config.get("launcher")
        else None
    )
    try:
        named = named_by_user(overrides) if primary.is_of_a_run else None
        schema.check(plain | {"launcher": launcher}, command, unused, named)
    except ConfigError as error:
        raise ConfigError(with_origin(str(error), choices, conf_folders(Path.cwd()))) from error
    typed = of_first_start([as_typed(override) for override in overrides], Path(plain["run_dir"]))
    shown = masked_arguments(joined(primary.typed, typed))
    recorded = keep(own, plain)
    of_hydra = {
        ".hydra/config.yaml": masked_lines(text),
        OVERRIDES: OmegaConf.to_yaml(OmegaConf.create(shown)),
    }
    plain |= {"launcher": launcher} if launcher else {}
    notes = changes(primary.saved, recorded.config)
    return ComposedJob(command, plain, of_hydra, notes, recorded)
