"""A search with Ray Tune: settings and space -> a Tuner of trials (trainable.py), each a run in a
folder of its own.

search -> Tuner.fit -> trial, trial, ... -> the number of trials; the runs' folders hold the rest
(extensions/reports/show)
"""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.console import plural
from trainkit.errors import ConfigError
from trainkit.extensions.ray.connection import connect_ray
from trainkit.extensions.ray.free import ranks_in
from trainkit.extensions.ray.options import RayOptions, shown
from trainkit.extensions.ray.tuning.trainable import load_tune, number_of
from trainkit.extensions.ray.tuning.trainable import trial as make_trial
from trainkit.extensions.ray.tuning.words import Drawn, SearchSettings
from trainkit.run.goal import Goal, write_goal

STORAGE = "ray"  # below the search's folder: Tune's own files and the reported checkpoints
_SETTLES_S = 2.0  # time for Ray's nodes to report what a job that has ended gave back
_KEPT = 4  # reported checkpoints of each trial; others may be about to copy them


@dataclass(frozen=True)
class Search:
    """What to search.

    Attributes:
        arguments: overrides of all trials, with conf=NAME.
        space: how the values of the searched keys are drawn.
        settings: of the search; metric and mode are given.
        max_epochs: of a run that no scheduler ends; None if it has max_steps only.
        max_steps: the same in steps.
        folder: absolute; holds the trials' folders, by number.
        goal: what tables compare the trials by.
    """

    arguments: Sequence[str]
    space: Mapping[str, Drawn]
    settings: SearchSettings
    max_epochs: int | None
    max_steps: int | None
    folder: Path
    goal: Goal


@dataclass(frozen=True)
class SearchEnd:
    """What a search came to.

    Attributes:
        num_trials: that were started; their folders have these numbers.
        num_ended: of them, those that ended, by themselves, by the scheduler or by an error.
        num_asked: trials that the search asked for.
    """

    num_trials: int
    num_ended: int
    num_asked: int


def search(request: Search, say: Callable[[str], None]) -> SearchEnd:
    """Run the trials. A trial that fails ends alone; a SIGINT ends all, as Tune does.

    Args:
        request: the search.
        say: prints a line when a trial ends.

    Raises:
        ConfigError: Ray is not installed, its cluster cannot be reached or has no room for a trial.
    """
    # each run writes its own curves
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # without Tune's tables
    tune = load_tune()
    settings = request.settings
    # before Ray starts: it refuses settings
    space = {key: _domain(tune, drawn) for key, drawn in request.space.items()}
    scheduler = _scheduler(request, space)
    start_ray(settings, say)
    write_goal(request.folder, request.goal)
    resources = settings.resources
    trainable = make_trial(
        request.arguments, settings.num_workers, resources, settings.metric, request.folder
    )
    basic = importlib.import_module("ray.tune.search.basic_variant").BasicVariantGenerator
    ended: set[str] = set()
    tuner = tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(
            metric=settings.metric,
            mode=settings.mode,
            num_samples=settings.num_samples,
            search_alg=basic(
                random_state=settings.seed, max_concurrent=settings.max_concurrent or 0
            ),
            scheduler=scheduler,
        ),
        run_config=tune.RunConfig(
            name=STORAGE,
            storage_path=str(request.folder),
            stop=_ends_of(request),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=_KEPT),
            callbacks=[_printer(tune, settings, say, ended)],
            verbose=0,
        ),
    )
    num_trials = len(tuner.fit())
    grids = [len(d.arguments) for d in request.space.values() if d.function == "grid"]
    return SearchEnd(num_trials, len(ended), settings.num_samples * math.prod(grids))


def start_ray(settings: SearchSettings, say: Callable[[str], None]) -> None:
    """Connect to the cluster of RAY_ADDRESS, or start one on this host; refuse trials that it has
    no room for. A cluster that may grow, or is taken by others, is waited for, with a line.

    Raises:
        ConfigError: the cluster cannot be reached, no node has the resources of a rank, or a
            cluster of this host not those of a trial.
    """
    connect_ray("A search")
    cluster = importlib.import_module("trainkit.extensions.ray.cluster")
    nodes = [node.total for node in cluster.living_nodes()]
    is_own = not os.environ.get("RAY_ADDRESS")
    if (room := ranks_in(nodes, settings.resources)) >= settings.num_workers:
        _say_if_taken(cluster, settings, say)
        return
    if not room:
        names = ("CPU", "GPU", *settings.resources)
        there = "; ".join(
            ", ".join(f"{name}: {node[name]:g}" for name in dict.fromkeys(names) if name in node)
            for node in nodes
        )
        text = (
            f"search.resources is {dict(settings.resources)}, and no node of the cluster has so"
            f" much: {there}"
        )
        if is_own or not cluster.may_grow():
            raise ConfigError(f"{text}. Ask for less, or add nodes.")
    else:
        text = (
            f"search.num_workers is {settings.num_workers}, each with"
            f" {shown(settings.resources)}, and the cluster has room for {plural(room, 'rank')}"
        )
        if is_own:
            raise ConfigError(f"{text}. Ask for less, or set RAY_ADDRESS to a larger one's.")
    say(f"{text}: no trial starts before nodes come")


def _say_if_taken(cluster: Any, settings: SearchSettings, say: Callable[[str], None]) -> None:
    """Print a line if other jobs hold what a trial takes."""
    options = RayOptions(settings.num_workers, settings.num_workers, settings.resources)
    end = time.monotonic() + _SETTLES_S
    while (
        ranks_in([node.free for node in cluster.living_nodes()], options.resources) < options.least
    ):
        if time.monotonic() > end:
            say(
                f"waiting for {options.asked} of a trial (search.resources);"
                f" {cluster.free_and_total(options)}"
            )
            return
        time.sleep(0.2)


def _domain(tune: Any, drawn: Drawn) -> Any:
    if drawn.function in ("choice", "grid"):
        return (tune.choice if drawn.function == "choice" else tune.grid_search)(
            list(drawn.arguments)
        )
    return getattr(tune, "randn" if drawn.function == "normal" else drawn.function)(
        *drawn.arguments
    )


def _scheduler(request: Search, space: Mapping[str, Any]) -> Any:
    settings = request.settings
    if settings.scheduler == "none":
        return None
    module = importlib.import_module("ray.tune.schedulers")
    by_epochs = request.max_epochs is not None
    if settings.scheduler == "asha":
        most = request.max_epochs if request.max_epochs is not None else request.max_steps
        if most is None:
            raise ConfigError(
                "search.scheduler is asha, which needs the length of a run: set trainer.max_epochs"
                " or max_steps."
            )
        return module.ASHAScheduler(
            time_attr="epoch" if by_epochs else "step",
            max_t=most,
            grace_period=grace_of(settings.grace_period, request.max_epochs, most),
            reduction_factor=settings.reduction_factor,
        )
    if grid := [key for key, drawn in request.space.items() if drawn.function == "grid"]:
        raise ConfigError(
            f"search.{grid[0]} is a grid, and search.scheduler=pbt changes values as it runs. Use"
            " choice(...)."
        )
    return module.PopulationBasedTraining(
        time_attr="epoch" if by_epochs else "step",
        perturbation_interval=interval_of(settings.interval, request.max_epochs),
        # a value that is multiplied may be none of a choice's
        hyperparam_mutations={
            key: list(drawn.arguments) if drawn.function == "choice" else space[key]
            for key, drawn in request.space.items()
        },
        synch=True,  # short runs would end before the others have reported
    )


def _ends_of(request: Search) -> dict[str, int] | None:
    """Return where Tune ends a trial of pbt, before its scheduler is asked: an exchange at a run's
    end would record values with which no step is trained.
    """
    if request.settings.scheduler != "pbt":
        return None
    limits = {"epoch": request.max_epochs, "step": request.max_steps}
    return {name: limit for name, limit in limits.items() if limit is not None} or None


def grace_of(given: int | None, max_epochs: int | None, most: int) -> int:
    """Return how long asha leaves each trial, in epochs, or in steps of a run that they limit.

    Raises:
        ConfigError: the given number, of epochs, has no effect.
    """
    if given is None:
        return 1 if max_epochs is not None else max(1, most // 10)
    if max_epochs is None:
        raise ConfigError(
            f"search.grace_period is {given}, of epochs, and trainer.max_steps={most} limits the"
            " run: asha looks at steps there, and leaves each trial a tenth of them. Leave it out,"
            " or set trainer.max_epochs."
        )
    if given > most:
        raise ConfigError(
            f"search.grace_period is {given}, and trainer.max_epochs is {most}: asha would end no"
            f" trial early. It must be {most} or less; search.scheduler=none lets all end."
        )
    return given


def interval_of(given: int | None, max_epochs: int | None) -> int:
    """Return how far pbt lets trials train between two exchanges, in epochs, or in steps of a run
    that they limit: 1, so that each validation exchanges.

    Raises:
        ConfigError: the given number, of epochs, would be one of steps.
    """
    if given is not None and max_epochs is None:
        raise ConfigError(
            f"search.interval is {given}, of epochs, and trainer.max_epochs is null: pbt exchanges"
            " after each validation there (trainer.val_check_interval). Leave it out, or set"
            " trainer.max_epochs."
        )
    return given or 1


def _printer(
    tune: Any, settings: SearchSettings, say: Callable[[str], None], ended: set[str]
) -> Any:
    """Return a callback of Tune's that prints a line for each trial that ends, and notes it."""

    def value(trial_value: Any) -> str:
        last = (trial_value.last_result or {}).get(settings.metric)
        return f"  {settings.metric} = {last:.4g}" if isinstance(last, float) else ""

    class Printer(tune.Callback):  # type: ignore[misc]
        """See _printer."""

        def on_trial_complete(
            self, iteration: int, trials: list[Any], trial: Any, **info: Any
        ) -> None:
            ended.add(trial.trial_id)
            epoch = (trial.last_result or {}).get("epoch")
            say(f"trial {number_of(trial.trial_id)} ended after epoch {epoch}{value(trial)}")

        def on_trial_error(
            self, iteration: int, trials: list[Any], trial: Any, **info: Any
        ) -> None:
            ended.add(trial.trial_id)
            say(f"trial {number_of(trial.trial_id)} failed")

    return Printer()
