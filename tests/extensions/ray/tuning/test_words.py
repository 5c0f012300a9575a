"""The words of a search, read without Ray; and a trial's values as overrides."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from trainkit.errors import ConfigError
from trainkit.extensions.jobs.overrides import override
from trainkit.extensions.ray.tuning.command import (
    SearchStopped,
    ranks_of,
    refuse_launcher,
    refuse_unfinished,
)
from trainkit.extensions.ray.tuning.search import SearchEnd, grace_of
from trainkit.extensions.ray.tuning.words import Drawn, read_search
from trainkit.extensions.reports.show.best import command_of
from trainkit.extensions.reports.show.files import read_any
from trainkit.run.goal import Goal, write_goal

LR = "search.optimizer.lr=loguniform(1e-4,1e-1)"


def test_words_of_a_search_are_read() -> None:
    """Settings, drawn keys and the config's own overrides are kept apart."""
    words = [
        "conf=mlp",
        LR,
        "search.num_samples=3",
        "search.resources={CPU: 1, GPU: 0.5}",
        "search.task.act=choice(relu,'a,b',null)",
    ]
    settings, space, others = read_search(words)
    assert (settings.num_samples, settings.resources) == (3, {"CPU": 1.0, "GPU": 0.5})
    assert space == {
        "optimizer.lr": Drawn("loguniform", (1e-4, 1e-1)),
        "task.act": Drawn("choice", ("relu", "a,b", None)),
    }
    assert others == ["conf=mlp"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("search.num_sample=8", r"'num_samples'\?"),
        (
            "search.optimizer.lr=loguniforn(1e-4,1e-1)",
            r"no function 'loguniforn'. Did you mean 'loguniform'\?",
        ),
        ("search.resources={cpu: 2}", r"search\.resources has 'cpu'; Ray's names are CPU, GPU"),
        ("search.resources={CPU: inf}", r"search\.resources is \{'CPU': inf\}; it must be"),
        ("search.optimizer.lr=0.1", "a searched key has a function"),
        ("search.optimizer.lr=uniform(1)", r"the arguments of uniform are \(low, high\)"),
        ("search.optimizer.lr=uniform(2,1)", "the first number must be below the second"),
        ("search.optimizer.lr=loguniform(0,1)", "loguniform needs numbers above 0"),
        ("search.optimizer.lr=uniform(a,b)", "must be numbers"),
        ("search.data.batch_size=randint(1.5,3)", "must be whole numbers"),
        ("search.num_samples=0", "search.num_samples is '0'; it must be a whole number, 1 or more"),
        ("search.scheduler=ahsa", r"one of asha, pbt, none. Did you mean 'asha'\?"),
        ("search.resources={CPU: none}", "resources of a rank"),
        ("search.mode=best", "it must be min or max"),
        ("search.metric=", "has no value"),
        ("search.optimizer.lr=uniform(0,1)", "given twice"),
        (
            "optimizer.lr=0.1",
            "optimizer.lr is searched by search.optimizer.lr, and set by optimizer.lr=",
        ),
    ],
)
def test_mistakes_are_named(word: str, message: str) -> None:
    """A mistake in the words of a search names key, value and what is legal."""
    with pytest.raises(ConfigError, match=message):
        read_search([LR, word] if "given twice" in message or "searched by" in message else [word])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["search.scheduler=none", "search.grace_period=3"],
            "search.grace_period is 3, and search.scheduler is none: it has no effect there.",
        ),
        (["search.scheduler=pbt", "search.reduction_factor=2"], "It is a setting of asha"),
        (["search.interval=2"], "search.interval is 2, and search.scheduler is asha: "),
    ],
)
def test_a_setting_of_another_scheduler_is_refused(words: list[str], message: str) -> None:
    """It would have no effect."""
    with pytest.raises(ConfigError, match=message):
        read_search([LR, *words])


@pytest.mark.parametrize(
    ("words", "trials"),
    [
        (["search.optimizer.lr=grid(0.1,0.2)"], 1),
        (["search.optimizer.lr=grid(0.1,0.2)", "search.num_samples=3"], 3),
        (["search.optimizer.lr=grid(0.1,0.2)", "search.seed=choice(1,2)"], None),
        (["search.optimizer.lr=grid(0.1,0.2)", "search.data.batch_size=choice(8,16)"], 8),
        ([LR], 8),
    ],
)
def test_a_grid_alone_runs_once(words: list[str], trials: int | None) -> None:
    """As with Tune: each combination again would be the same run, of the same seed."""
    if trials is None:  # the search's own seed
        with pytest.raises(ConfigError, match=r"search\.seed"):
            read_search(words)
    else:
        assert read_search(words)[0].num_samples == trials


def test_a_search_needs_a_key() -> None:
    """Without a key there is nothing to search."""
    with pytest.raises(ConfigError, match="There is nothing to search"):
        read_search(["conf=mlp", "search.num_samples=4"])


@pytest.mark.parametrize(
    "value",
    [0.1, 3, True, None, "adamw", "a b", "it's", "null", "", [1, "x y"], {"a": 1}, "/a/b=c", "a,b"],
)
def test_a_value_survives_as_an_override(value: object) -> None:
    """Hydra reads the value that a trial was given, whatever it is."""
    (parsed,) = OverridesParser.create().parse_overrides([override("key", value)])
    found = parsed.value()
    assert (found.text if hasattr(found, "text") else found) == value
    assert re.fullmatch(r"key=.*", override("key", value))


@pytest.mark.parametrize(
    ("resources", "typed"),
    [("{CPU: 1}", ""), ("{GPU: 1}", " 'launcher.resources_per_worker={CPU: 0, GPU: 1}'")],
)
def test_the_best_trial_is_repeated_on_its_ranks(
    resources: str, typed: str, tmp_path: Path
) -> None:
    """One rank would train with half the batch, half the rate, and twice the steps."""
    settings, _, own = read_search(
        ["conf=mlp", LR, "search.num_workers=2", f"search.resources={resources}"]
    )
    write_goal(tmp_path, Goal("val/acc", "max", ranks_of(settings)))
    lines = [*own, "callbacks.tune={}", "optimizer.lr=0.1", f"run_dir={tmp_path}/0"]
    (tmp_path / "0" / ".hydra").mkdir(parents=True)
    (tmp_path / "0" / ".hydra" / "overrides.yaml").write_text(json.dumps(lines))
    ranks = f"launcher=ray launcher.num_workers=2{typed}"
    command = command_of(read_any(tmp_path / "0", "0"))
    assert command == f"python -m trainkit fit conf=mlp optimizer.lr=0.1 {ranks}"


def test_a_config_with_a_launcher_is_refused() -> None:
    """Each trial would hold a CPU, and wait for its ranks'."""
    target = "trainkit.extensions.ray.launcher.RayLauncher"
    refuse_launcher({"launcher": {}})
    with pytest.raises(ConfigError, match=r"launcher is ray, .*: search\.num_workers=N"):
        refuse_launcher({"launcher": {"_target_": target}})


@pytest.mark.parametrize(
    ("given", "max_epochs", "expected"),
    [(None, 5, 1), (None, None, 10), (5, 5, 5), (6, 5, "asha would end no"), (2, None, "a tenth")],
)
def test_the_grace_of_asha_has_an_effect(
    given: int | None, max_epochs: int | None, expected: int | str
) -> None:
    """A number that ends no trial early, and one of epochs for a run of steps, are refused."""
    most = 100 if max_epochs is None else max_epochs
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            grace_of(given, max_epochs, most)
    else:
        assert grace_of(given, max_epochs, most) == expected


def test_a_search_that_was_stopped_says_so(tmp_path: Path) -> None:
    """Trials that a signal ended have not failed; the exit code is that of Ctrl-C."""
    refuse_unfinished(SearchEnd(4, 4, 4), tmp_path)
    with pytest.raises(SearchStopped, match=r"2 of 30 trials ended, .* another run_dir") as caught:
        refuse_unfinished(SearchEnd(4, 2, 30), tmp_path)
    assert caught.value.exit_code == 130
