"""What a search asks of Ray Tune: its scheduler, without a cluster."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import ConfigError
from trainkit.extensions.ray.tuning.search import Search, _domain, _scheduler
from trainkit.extensions.ray.tuning.words import read_search
from trainkit.run.goal import Goal

pbt = pytest.importorskip("ray.tune.schedulers.pbt")
tune = pytest.importorskip("ray.tune")
WORDS = ["search.scheduler=pbt", "search.optimizer.lr=loguniform(1e-4,1e-1)"]


def request_of(*words: str, max_epochs: int | None = 5, max_steps: int | None = None) -> Search:
    """Return a search by these words."""
    settings, space, others = read_search([*WORDS, *words])
    return Search(others, space, settings, max_epochs, max_steps, Path("/runs"), Goal("a", "max"))


def pbt_of(request: Search) -> Any:
    """Return the search's scheduler."""
    return _scheduler(request, {key: _domain(tune, drawn) for key, drawn in request.space.items()})


@pytest.mark.parametrize("choice", ["sgd,null", "16,32,64", "true,false"])
def test_pbt_stays_within_a_choice(choice: str) -> None:
    """A changed value is one of the list; names and null were multiplied by 1.2, and so were batch
    sizes.
    """
    request = request_of(f"search.task.x=choice({choice})")
    legal = list(request.space["task.x"].arguments)
    mutations = pbt_of(request)._hyperparam_mutations
    random.seed(0)
    for number in range(40):
        config = {"optimizer.lr": 0.01, "task.x": legal[number % len(legal)]}
        changed, _ = pbt._explore(config, mutations, 0.25, (1.2, 0.8), None)
        assert changed["task.x"] in legal
        assert type(changed["task.x"]) in {type(value) for value in legal}


def test_the_interval_of_pbt_is_of_epochs() -> None:
    """Of a run that steps limit it was a number of steps in silence; without one each validation
    exchanges there.
    """
    assert pbt_of(request_of("search.interval=2"))._perturbation_interval == 2
    by_steps = pbt_of(request_of(max_epochs=None, max_steps=200))
    assert (by_steps._time_attr, by_steps._perturbation_interval) == ("step", 1)
    with pytest.raises(ConfigError, match=r"search\.interval is 2, of epochs, .* Leave it out"):
        pbt_of(request_of("search.interval=2", max_epochs=None, max_steps=200))
