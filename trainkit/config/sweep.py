"""Several runs from one command (-m): their values, what each returns to the sweeper, and a record
of all.

values of a sweep    `jobs_of`: each combination of a grid; for a sweeper that draws its values, jobs that cover each once
settings             `sweep_settings`: what the sweeper optimises, and Hydra's own settings that follow
each run             `SweepRun`, which Hydra's launcher calls, here or in another process
afterwards           `Sweep.trials`: read from the notes that the runs leave in <run_dir>/sweep/
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig, OmegaConf

from trainkit.config.command_line import as_typed
from trainkit.config.of_run import OVERRIDES, flat, read_config, read_overrides
from trainkit.config.resources import make_importable
from trainkit.errors import ConfigError, TrainkitError, did_you_mean, summary
from trainkit.launch.environment import read_launcher
from trainkit.run.goal import FOLDER, Goal, goal_of_config, write_goal
from trainkit.run.state import RunState, read_state, write_state
from trainkit.safety.masking import masked_arguments
from trainkit.safety.tracebacks import text_of

_HYDRAS = "hydra._internal.core_plugins"
BASIC_LAUNCHER = f"{_HYDRAS}.basic_launcher"
_BASIC = (f"{_HYDRAS}.basic_sweeper.BasicSweeper", f"{BASIC_LAUNCHER}.BasicLauncher")
_MODES = {"min": "minimize", "max": "maximize"}


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        number: from 0.
        run_dir: its folder.
        state: how it ended.
    """

    number: int
    run_dir: Path
    state: RunState


@dataclass(frozen=True)
class Sweep:
    """The runs of one command.

    Attributes:
        folder: that holds the runs' folders.
        goal: what the runs are compared by.
        returns_metric: whether the sweeper draws its values by this metric; a grid does not.
    """

    folder: Path
    goal: Goal = Goal()
    returns_metric: bool = False

    def begin(self) -> None:
        """Delete the notes of an earlier sweep in the folder; record what this one compares by."""
        for note in (self.folder / FOLDER).glob("*.json"):
            note.unlink()
        write_goal(self.folder, self.goal)

    def note(self, number: int, run_dir: Path) -> None:
        """Record that a run has started, and its folder."""
        (self.folder / FOLDER).mkdir(parents=True, exist_ok=True)
        (self.folder / FOLDER / f"{number}.json").write_text(
            json.dumps({"run_dir": str(run_dir)}) + "\n"
        )

    def trials(self) -> list[SweepRun]:
        """Return all runs that started, by number."""
        notes = sorted((self.folder / FOLDER).glob("[0-9]*.json"), key=lambda path: int(path.stem))
        folders = [
            (int(path.stem), Path(json.loads(path.read_text())["run_dir"])) for path in notes
        ]
        return [SweepRun(number, folder, read_state(folder)) for number, folder in folders]


class SweepEndedError(BaseException):
    """Ends the whole sweep: not an Exception,
    since Hydra would record it as one run's and continue. Its cause is the error.
    """


@dataclass(frozen=True)
class TrialRunner:
    """Runs one job of a sweep, in this process or, sent by a launcher, in another.

    Attributes:
        sweep: to which the run belongs.
        make_job: composes and checks; returns the job and its folder's name.
        work: runs the job; returns the latest logged values.
        is_main: whether this is rank 0.
        process: the id of the process that Hydra runs in.
    """

    sweep: Sweep
    make_job: Callable[[DictConfig], Any]
    work: Callable[[Any], Mapping[str, float] | None]
    is_main: bool
    process: int

    def __call__(self, config: DictConfig) -> float | None:
        """Run; return the metric for the sweeper,
        or None if the run failed or none is asked for.
        """
        make_importable()  # for another process
        hydra = HydraConfig.get()
        number, overrides = int(hydra.job.num), [as_typed(text) for text in hydra.overrides.task]
        run_dir = self.sweep.folder / str(number)
        if self.is_main:
            self.sweep.note(number, run_dir)
        try:
            job = self.make_job(config)
            run_dir = Path(job.config["run_dir"]).absolute()
            if self.is_main:
                self.sweep.note(number, run_dir)
            values = self.work(job) or {}
            return self._returned(values)
        except Exception as error:
            if read_launcher().world_size > 1:  # the other ranks wait for this one
                raise SweepEndedError from error
            self._record(number, run_dir, error, overrides)
            if self.sweep.returns_metric:
                # the sweeper learns that there is no value
                raise TrainkitError(f"run {number} failed: {error}") from None
            return None

    def _returned(self, values: Mapping[str, float]) -> float | None:
        metric = self.sweep.goal.metric
        if metric is None:
            return None
        if metric not in values:
            error = ConfigError(
                f"optimized_metric is '{metric}', and the run logged none of this"
                f" name.{did_you_mean(metric, values)} It logged {', '.join(values)}."
            )
            if os.getpid() == self.process:
                raise SweepEndedError from error  # every run would end like this one
            raise error
        if self.sweep.returns_metric and not math.isfinite(values[metric]):
            raise TrainkitError(f"{metric} is {values[metric]}: there is nothing to compare.")
        return float(values[metric])

    def _record(
        self, number: int, run_dir: Path, error: Exception, overrides: Sequence[str]
    ) -> None:
        text = str(error) if isinstance(error, TrainkitError) else text_of(error)
        print(f"Error in run {number}: {text}", file=sys.stderr, flush=True)
        record_failure(run_dir, summary(error), overrides)


def record_failure(run_dir: Path, error: str, overrides: Sequence[str]) -> None:
    """Write into a run's folder that it failed, and with which overrides,
    if it did not come to that itself.
    """
    if not (run_dir / OVERRIDES).is_file():
        (run_dir / OVERRIDES).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / OVERRIDES).write_text(
            OmegaConf.to_yaml(OmegaConf.create(masked_arguments(overrides)))
        )
    write_state(run_dir, "failed", error)


def is_basic(part: Mapping[str, Any]) -> bool:
    """Return whether a sweeper or launcher is Hydra's own:
    a grid, one run after another in this process.
    """
    return part.get("_target_") in _BASIC


def show_as_typed(record: logging.LogRecord) -> bool:
    """Write the overrides of a log line as they were typed. A filter of logging."""
    record.msg = " ".join(map(as_typed, str(record.msg).split(" ")))
    return True


def jobs_of(overrides: Sequence[str], is_grid: bool) -> list[list[str]]:
    """Return the overrides of jobs to check before the first run.

    Args:
        overrides: as typed, with sweeps as `a=1,2`, `range(...)`, `choice(...)`, `interval(...)`.
        is_grid: every value with every other, as Hydra's basic sweeper runs them. Otherwise each
            value at least once.

    Raises:
        ConfigError: an interval in a grid.
    """
    hydra = GlobalHydra.instance()
    # lists the names that a glob(*) means
    loader = hydra.config_loader() if hydra.is_initialized() else None
    parsed = OverridesParser.create(loader).parse_overrides(list(overrides))
    values = [
        _values(text, override, is_grid) for text, override in zip(overrides, parsed, strict=True)
    ]
    if is_grid:
        return [list(combination) for combination in itertools.product(*values)]
    return [
        [held[i % len(held)] for held in values] for i in range(max(map(len, values), default=1))
    ]


def _values(text: str, override: Override, is_grid: bool) -> list[str]:
    key = override.get_key_element()
    if override.is_discrete_sweep():
        held = [f"{key}={value}" for value in override.sweep_string_iterator()]
        if not held:
            raise ConfigError(
                f"{text.removeprefix('++')} matches no config, so there is no run. glob is for"
                " names of configs, as optimizer=glob(s*); for other values give a list: key=1,2."
            )
        return held
    interval = override.value()
    if not isinstance(interval, IntervalSweep):
        return [text]
    if is_grid:
        raise ConfigError(
            f"{text.removeprefix('++')} has no list of values. Let a sweeper draw them: -m"
            " hydra/sweeper=optuna. Or give a list: key=1,2 or key=range(1,5), with -m."
        )
    return [f"{key}={interval.start}", f"{key}={interval.end}"]


def refuse_another_order(folder: Path, jobs: Sequence[Sequence[str]]) -> None:
    """Refuse to resume an earlier sweep in the folder if a run's number has other values now: it
    would resume from another run's checkpoint.

    Raises:
        ConfigError: a run has; names both.
    """
    notes = folder / FOLDER / "multirun.yaml"  # Hydra's
    typed = read_config(notes)["hydra"]["overrides"]["task"] if notes.is_file() else []
    now, earlier = ([_settings(job) for job in each] for each in (jobs, jobs_of(typed, False)))
    swept = {
        key
        for runs in (now, earlier)
        for run in runs
        for key, value in run.items()
        if runs[0].get(key, value) != value
    }
    for number, new in enumerate(now):
        old = _settings("=".join(one) for one in read_overrides(folder / str(number)).items())
        other = [key for key in new if key in swept and old.get(key, new[key]) != new[key]]
        if other and (folder / str(number) / "checkpoints").is_dir():
            was, is_now = (", ".join(f"{key}={run[key]}" for key in other) for run in (old, new))
            raise ConfigError(
                f"resume is 'auto', and {folder / str(number)} holds checkpoints of {was}; in this"
                f" sweep run {number} is {is_now}, and would resume from those. Give the values in"
                " the order of the earlier sweep, or another folder: run_dir=..."
            )


def _settings(lines: Iterable[str]) -> dict[str, str]:
    """Return key -> text, without quotes, secrets masked as in a run's folder."""
    parts = (line.lstrip("+").partition("=") for line in masked_arguments([*lines]))
    return {key: value.strip("'\"") for key, _, value in parts}


def sweep_settings(
    hydra: Mapping[str, Any], config: Mapping[str, Any], typed: Sequence[str]
) -> tuple[Sweep, list[str]]:
    """Return the sweep, and overrides of Hydra's own settings that follow from it.

    Args:
        hydra: Hydra's resolved node.
        config: of the first job; its run_dir is the sweep's.
        typed: the overrides of the command line.

    Raises:
        ConfigError: the metric or its direction is missing, or several ranks cannot run it.
    """
    sweeper, launcher = hydra["sweeper"], hydra["launcher"]
    goal = swept_goal(config, sweeper)
    metric, mode = goal.metric, goal.mode
    returns = not is_basic(sweeper)
    sweep = Sweep(Path(config["run_dir"]).absolute(), goal, returns)
    _refuse_ranks(sweeper, launcher)
    if not returns:
        return sweep, []
    if metric is None:
        raise ConfigError(
            "optimized_metric is missing: the sweeper optimises a logged value, and no callback"
            " monitors one. Give it: optimized_metric=val/loss."
        )
    own: dict[str, Any] = {}
    if "direction" in sweeper:
        if mode is None:
            raise ConfigError(
                f"hydra.sweeper.direction is missing: no callback monitors {metric}, so it is"
                " unknown whether a small or a large value is good. Give"
                " hydra.sweeper.direction=minimize or maximize."
            )
        own["direction"] = _MODES[mode]
    if "n_jobs" in sweeper and is_basic(launcher):
        own["n_jobs"] = 1  # runs follow each other, so each can learn from the one before it
    if sweeper.get("max_failure_rate") == 0.0:
        own["max_failure_rate"] = 1.0  # a failed run is reported at the end; the others continue
    if (
        sweeper.get("storage") is None
        and "seed" in (sampler := sweeper.get("sampler") or {})
        and sampler["seed"] is None
    ):
        # a stored study, continued, would draw its first values again
        own["sampler.seed"] = config["seed"]
    given = {override.lstrip("+").partition("=")[0] for override in typed}
    return sweep, [
        f"hydra.sweeper.{key}={value}"
        for key, value in own.items()
        if f"hydra.sweeper.{key}" not in given
    ]


def swept_goal(config: Mapping[str, Any], sweeper: Mapping[str, Any]) -> Goal:
    """Return what a config's runs are compared by; its mode is the sweeper's direction, if that is
    given.

    Raises:
        ConfigError: the direction is not legal.
    """
    goal = goal_of_config(flat(config))
    direction = sweeper.get("direction")
    if isinstance(direction, list):
        raise ConfigError(
            "hydra.sweeper.direction is a list; optimized_metric is one value. Give minimize or"
            " maximize."
        )
    if isinstance(direction, str):  # the plugin's own default is an enum
        if direction not in _MODES.values():
            raise ConfigError(
                f"hydra.sweeper.direction is '{direction}'; it must be minimize or maximize."
            )
        return dataclasses.replace(goal, mode=direction[:3])
    return goal


def _refuse_ranks(sweeper: Mapping[str, Any], launcher: Mapping[str, Any]) -> None:
    if read_launcher().world_size == 1:
        return
    if not is_basic(launcher):
        raise ConfigError(
            "hydra/launcher starts each run in a process of its own, and here are several ranks of"
            " one job. Start it without horovodrun or torchrun, or leave hydra/launcher out: all"
            " ranks then run one after another."
        )
    if sweeper.get("storage") is not None:
        raise ConfigError(
            "hydra.sweeper.storage is for one process: each rank would ask it for other values."
            " Leave it out."
        )
