"""tune: searches for the best settings of a config with Ray Tune,
and prints a table of the trials and the best command.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.cli.guard import main_alone
from trainkit.cli.usage import help_text
from trainkit.config.launchers import launcher_of
from trainkit.config.of_run import flat
from trainkit.console import console_of, plural, short
from trainkit.errors import ConfigError, TrainkitError
from trainkit.extensions.jobs.overrides import override
from trainkit.extensions.ray.options import shown
from trainkit.extensions.ray.tuning.search import Search, SearchEnd, search
from trainkit.extensions.ray.tuning.usage import USAGE
from trainkit.extensions.ray.tuning.words import SearchSettings, read_search
from trainkit.extensions.reports.show.best import print_best
from trainkit.extensions.reports.show.files import FinishedRun, read_any
from trainkit.extensions.reports.show.table import print_table
from trainkit.launch.environment import read_launcher
from trainkit.run.goal import Goal, goal_of_config

if TYPE_CHECKING:
    from trainkit.config.compose import ComposedJob


class SearchStopped(TrainkitError):
    """A signal ended a search before its trials."""

    exit_code = 130


def main(command: str, arguments: Sequence[str]) -> int:
    """Search: conf=NAME search.KEY=FUNCTION(...) [search.NAME=...] [overrides];
    return the exit code.
    """
    return main_alone(arguments or ["--help"], help_text(command, USAGE), lambda: _work(arguments))


def _work(arguments: Sequence[str]) -> None:
    if read_launcher().world_size > 1:
        raise ConfigError("tune starts its trials itself. Start it without horovodrun or torchrun.")
    settings, space, others = read_search(arguments)
    job = _composed([*others, *(override(key, drawn.example()) for key, drawn in space.items())])
    refuse_launcher(job.config)
    settings = _with_goal(settings, job.config)
    goal = Goal(settings.metric, settings.mode, ranks_of(settings))
    folder = Path(job.config["run_dir"]).absolute()
    if any(path.name.isdigit() for path in folder.glob("*")):
        raise ConfigError(
            f"run_dir is {short(folder)}, which holds the trials of another search. Choose a new"
            " folder."
        )
    trainer = job.config["trainer"]
    own = [word for word in others if not word.lstrip("+").startswith("run_dir=")]
    request = Search(
        own,
        space,
        settings,
        limit_of(trainer, "max_epochs"),
        limit_of(trainer, "max_steps"),
        folder,
        goal,
    )
    console = console_of()
    console.print(
        f"search  {settings.metric} ({settings.mode}), scheduler {settings.scheduler}:"
        f" {short(folder)}",
        soft_wrap=True,
    )
    if settings.num_samples > 1 and all(drawn.function == "grid" for drawn in space.values()):
        console.print(
            f"grid    each combination trains {settings.num_samples} times with the same seed"
            " (search.num_samples)"
        )
    end = search(request, lambda line: print(line, flush=True))
    runs = [read_any(folder / str(place), str(place)) for place in range(end.num_trials)]
    _show(runs, request, end)


def limit_of(trainer: Mapping[str, Any], name: str) -> int | None:
    """Return a limit of a run; None if there is none, as -1 says too."""
    given = trainer.get(name)
    return None if given == -1 else given


def _composed(arguments: Sequence[str]) -> ComposedJob:
    """Return the job of a trial, checked as `fit` checks it."""
    compose: Any = importlib.import_module("trainkit.config.compose")
    jobs: list[ComposedJob] = []
    compose.run("fit", arguments, True, jobs.append)
    if len(jobs) != 1:
        raise ConfigError(
            "tune takes no flags of Hydra; a search is written search.KEY=FUNCTION(...)."
        )
    return jobs[0]


def refuse_launcher(config: Mapping[str, Any]) -> None:
    """Refuse a config whose trials would ask for ranks of their own, beside the search.

    Raises:
        ConfigError: it has a launcher.
    """
    if given := config.get("launcher"):
        name = launcher_of({"launcher": given}).name
        raise ConfigError(
            f"launcher is {name}, and a search starts its trials on Ray itself: ranks that each"
            " trial asked for would wait for what the trials hold. Leave it out (launcher=none);"
            " trials of several ranks: search.num_workers=N, with search.resources of each."
        )


def _with_goal(settings: SearchSettings, config: dict[str, Any]) -> SearchSettings:
    """Return the settings with metric and mode;
    those that are not given come from the callback that monitors a value.
    """
    asked = {} if settings.metric is None else {"optimized_metric": settings.metric}
    goal = goal_of_config(flat({**config, **asked}))
    if goal.metric is None:
        raise ConfigError(
            "search.metric is missing: no callback of the config monitors a value. Give it:"
            " search.metric=val/loss."
        )
    mode = settings.mode or goal.mode
    if mode is None:
        raise ConfigError(
            f"search.mode is missing: no callback monitors {goal.metric}, so it is unknown whether a"
            " small or a large value is good. Give search.mode=min or max."
        )
    return dataclasses.replace(settings, metric=goal.metric, mode=mode)


def ranks_of(settings: SearchSettings) -> tuple[str, ...]:
    """Return the overrides that start a run on as many ranks as a trial has, with the same
    resources; none for one rank.
    """
    if settings.num_workers == 1:
        return ()
    # An override joins a mapping to the config's own, in which a rank takes a CPU.
    resources = {"CPU": 0} | dict(settings.resources)
    ranks = ["launcher=ray", f"launcher.num_workers={settings.num_workers}"]
    ranks += [f"launcher.resources_per_worker={shown(resources)}"] * (resources != {"CPU": 1})
    return tuple(ranks)


def refuse_unfinished(end: SearchEnd, folder: Path) -> None:
    """Raise the end of a search that a signal cut off.

    Raises:
        SearchStopped: not all trials have ended.
    """
    if end.num_ended < end.num_asked:
        raise SearchStopped(
            f"The search was stopped (SIGINT): {end.num_ended} of {plural(end.num_asked, 'trial')}"
            " ended, and the table has what there is. It cannot be resumed: start it again with"
            f" another run_dir; {short(folder)} holds this one's runs."
        )


def _show(runs: Sequence[FinishedRun], request: Search, end: SearchEnd) -> None:
    console = console_of()
    print_table(runs, request.goal, console, request.space)
    console.print(f"folder  {short(request.folder)}", soft_wrap=True)
    print_best(runs, request.goal, console, ["runs", short(request.folder)])
    refuse_unfinished(end, request.folder)
    failed = [run for run in runs if run.state.name != "done"]
    if failed:
        text = failed[0].state.error.strip().partition("\n")[0]
        raise TrainkitError(
            f"{len(failed)} of {plural(len(runs), 'trial')} failed; the first (trial"
            f" {failed[0].name}): {text}"
        )
