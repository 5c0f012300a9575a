"""What a search asks of Ray Tune: its scheduler, without a cluster."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import ConfigError
from trainkit.extensions.ray.tuning import search as module
from trainkit.extensions.ray.tuning.command import limit_of
from trainkit.extensions.ray.tuning.search import Search, _domain, _scheduler, search
from trainkit.extensions.ray.tuning.words import read_search
from trainkit.run.goal import Goal

pbt = pytest.importorskip("ray.tune.schedulers.pbt")
tune = pytest.importorskip("ray.tune")
WORDS = ["conf=mlp", "search.scheduler=pbt", "search.optimizer.lr=loguniform(1e-4,1e-1)"]


def request_of(
    *words: str,
    max_epochs: int | None = 5,
    max_steps: int | None = None,
    folder: Path = Path("/runs"),
) -> Search:
    """Return a search by these words, which come before those of all."""
    given = {word.partition("=")[0] for word in words}
    words = (*words, *(word for word in WORDS if word.partition("=")[0] not in given))
    settings, space, others = read_search([*words, "search.metric=val/acc", "search.mode=max"])
    return Search(others, space, settings, max_epochs, max_steps, folder, Goal("val/acc", "max"))


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


class _Started(Exception):
    """A Tuner was built."""


def settings_of_tuner(request: Search, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the search gives Tune, without a cluster."""
    given: dict[str, Any] = {}

    def build(*args: object, **settings: Any) -> None:
        given.update(settings)
        raise _Started

    monkeypatch.setattr(tune, "Tuner", build)
    monkeypatch.setattr(module, "start_ray", lambda *_: None)
    with pytest.raises(_Started):
        search(request, print)
    return given


@pytest.mark.parametrize(
    ("words", "limits", "expected"),
    [
        ([], (3, None), {"epoch": 3}),
        ([], (None, 60), {"step": 60}),
        ([], (3, 60), {"epoch": 3, "step": 60}),
        (["search.scheduler=none"], (3, None), None),
    ],
)
def test_pbt_exchanges_no_more_after_the_last_epoch(
    words: list[str],
    limits: tuple[int | None, int | None],
    expected: dict[str, int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tune asks `stop` before the scheduler: a trial at its end got values that trained no step, and
    they were recorded as its own.
    """
    request = request_of(*words, max_epochs=limits[0], max_steps=limits[1], folder=tmp_path)
    given = settings_of_tuner(request, monkeypatch)
    assert given["run_config"].stop == expected


def test_minus_one_is_no_limit() -> None:
    """A search of `trainer.max_epochs=-1` is one by steps."""
    trainer = {"max_epochs": -1, "max_steps": 60, "max_time": None}
    assert [limit_of(trainer, name) for name in trainer] == [None, 60, None]
