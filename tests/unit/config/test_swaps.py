"""Every conf with every choice of every group: its own numbers, or which choice excludes which."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf

from trainkit.config import pairs
from trainkit.config.compose import ComposedJob, run
from trainkit.config.of_run import flat, read_config
from trainkit.config.resources import shipped_root
from trainkit.errors import ConfigError

Compose = Callable[..., ComposedJob]
CONF = shipped_root() / "conf"
TOPS = sorted(p.stem for p in CONF.glob("*.yaml") if not p.stem.startswith("_"))
FOLDERS = [path for path in sorted(CONF.iterdir()) if path.is_dir()]
GROUPS = {path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in FOLDERS}
# Groups whose choices have numbers that a recipe changes.
PARTS = ("augment", "data", "lr", "optimizer", "task")
IMAGES = ("digits", "imagefolder", "ray", "synthetic", "webdataset")
SEVERAL = ("callbacks", "logger")
# Confs, data and tasks of one shape of batch; data=ray has the columns that the user names.
FAMILIES: list[set[str]] = [
    {"mlp", "resnet18", "resnet50", "resnet50_a3", "vit_b16", *IMAGES},
    {"gpt", "gpt_124m", "llama", "text", "token_mixture", "tokens"},
    {"bert", "masked_tokens"},
    {"hf_causal_lm", "texts", "ray"},
    {"sft", "chat"},
    {"dpo", "pairs"},
    {"hf_classifier", "labelled_texts", "ray"},
    {"recommender", "ratings"},
]
# What else excludes each other: an augmentation is a setting of image data, and Ray's has none.
EXCLUDED = {("resnet50_a3", "ray"), ("vit_b16", "ray")}
NEEDED = {
    "imagefolder": ["data.root=."],
    "webdataset": ["data.root=."],
    "token_mixture": ["data.roots=[.]", "data.weights=[1]"],
    "ray": ["data.train=.", "data.num_classes=10"],
}
# A number of a conf for each choice of a group: the perceptron's inputs are 3 x 8 x 8.
FOR_ANY = {("mlp", "data"): {"image_size": 8}}
REFUSALS = (
    r"data\.tokenizer is not a setting",  # conf=sft, conf=dpo on other data
    r"data=\w+ and task=\w+ exclude each other: the data yields .*, the task takes .*\. Choose ",
    r"data=ray and augment=\w+ exclude each other: augment=\w+ sets data\.augment\. ",
    r"This config chooses no (augment|lr), so there is none to replace: ",
    r"task\.\S+ is \$\{data\.\w+\}, and there is no data\.\w+\. Choose another data=NAME",
)


@functools.cache
def yaml_of(*parts: str) -> dict[str, Any]:
    """Return the content of a file of conf/."""
    return read_config(CONF.joinpath(*parts[:-1]) / f"{parts[-1]}.yaml")


def chosen(conf: str) -> dict[str, str]:
    """Return the choices that a conf makes."""
    lines = yaml_of(conf)["defaults"]
    return {group: name for line in lines if isinstance(line, dict) for group, name in line.items()}


def own_numbers(conf: str, group: str, choice: str) -> dict[str, Any]:
    """Return what the files give for a choice, without interpolations: key -> value."""
    file, recipe = yaml_of(group, choice), yaml_of(conf)
    nodes = [file.get(group, file), recipe.get(f"{group}={choice}", {})]
    nodes.append(FOR_ANY.get((conf, group), {}))
    augment = chosen(conf).get("augment")
    if augment is not None and group in ("data", "task"):
        nodes.append(yaml_of("augment", augment).get(group, {}))
    merged = OmegaConf.to_container(OmegaConf.merge(*nodes), resolve=False)
    return {key: value for key, value in flat({group: merged}).items() if value != {}}


def needed(conf: str, group: str = "", choice: str = "") -> list[str]:
    """Return the overrides without which the data of a command has no files."""
    return NEEDED.get(choice if group == "data" else chosen(conf)["data"], [])


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> Compose:
    """A function that composes and checks a command; what is the same for all is composed once."""
    nodes = functools.lru_cache(pairs._nodes)
    monkeypatch.setattr(pairs, "_nodes", lambda group, at: nodes(group, tuple(at)))
    monkeypatch.setattr("trainkit.config.schema.require", lambda name: None)  # of an engine

    def job_of(*arguments: str) -> ComposedJob:
        jobs: list[ComposedJob] = []
        run("fit", arguments, True, jobs.append)
        return jobs[0]

    return job_of


def test_all_choices_are_walked() -> None:
    """The walk sees each file, and each conf, data and task has a family."""
    assert sum(map(len, GROUPS.values())) == len(list(CONF.glob("*/*.yaml"))) >= 80
    assert {*TOPS, *GROUPS["data"], *GROUPS["task"]} == set().union(*FAMILIES)
    assert set(PARTS) < set(GROUPS)


def fits(conf: str, group: str, choice: str) -> bool:
    """Return whether a choice goes with a conf."""
    family = next(one for one in FAMILIES if conf in one)
    matches = choice in family if group in ("data", "task") else group in chosen(conf)
    return matches and (conf, choice) not in EXCLUDED


def check_numbers(conf: str, group: str, choice: str, arguments: list[str], job: Any) -> None:
    """Check a composed part: all numbers of its choice, and none of another."""
    config = job.config
    if group == "augment":
        numbers = flat(yaml_of(group, choice))
        held = flat({key: config[key] for key in ("data", "task")})
    else:
        numbers, held = own_numbers(conf, group, choice), flat({group: config[group]})
        nodes = (f"{group}.augment", "task.mix", "task.optimizer", "task.lr")
        extra = {key for key in held.keys() - numbers.keys() if not key.startswith(nodes)}
        assert not extra, f"{arguments}: {extra} are of another choice"
    for key, value in numbers.items():
        if not re.search(r"\$\{|\?\?\?", str(value)) and f"{key}=" not in " ".join(arguments):
            assert held.get(key, "nothing") == value, f"{arguments}: {key}"


@pytest.mark.parametrize(
    "together", [("augment", "lr", "optimizer"), ("data", "task")], ids="-".join
)
@pytest.mark.parametrize("conf", TOPS)
def test_a_choice_brings_its_own_numbers(
    conf: str, together: tuple[str, ...], composed: Compose
) -> None:
    """No number of another choice is in it. A command chooses in several groups at once."""
    walks = [
        [(group, choice) for choice in GROUPS[group] if fits(conf, group, choice)]
        for group in together
    ]
    for row in itertools.zip_longest(*walks):
        choices = dict(filter(None, row))
        typed = [f"{group}={choice}" for group, choice in choices.items()]
        data = "data" if "data" in choices else ""
        arguments = [f"conf={conf}", *typed, *needed(conf, data, choices.get("data", ""))]
        job = composed(*arguments)
        for group, choice in choices.items():
            check_numbers(conf, group, choice, arguments, job)


@pytest.mark.parametrize("group", PARTS)
@pytest.mark.parametrize("conf", [min(family & {*TOPS}) for family in FAMILIES])
def test_a_choice_that_cannot_match_is_one_sentence(
    conf: str, group: str, composed: Compose
) -> None:
    """It names the choice, or the group if the conf has no part of it; the confs of a family refuse
    alike.
    """
    for choice in GROUPS[group]:
        if fits(conf, group, choice):
            continue
        arguments = [f"conf={conf}", f"{group}={choice}", *needed(conf, group, choice)]
        with pytest.raises(ConfigError) as refused:
            composed(*arguments)
        text = str(refused.value)
        assert any(re.match(pattern, text) for pattern in REFUSALS), f"{arguments}: {text}"
        assert f"{group}={choice}" in text or group in text.split(":")[0]
        assert len(text) < 600


@pytest.mark.parametrize("conf", TOPS)
def test_any_engine_and_callback_goes_with_a_conf(conf: str, composed: Compose) -> None:
    """All choices of the groups without numbers of recipes, as many as fit in one command."""
    start = [f"conf={conf}", *needed(conf)]
    task = yaml_of("task", chosen(conf)["task"])
    lists = {group: [name for name in GROUPS[group] if name != "none"] for group in SEVERAL}
    several = [f"{group}=[{','.join(names)}]" for group, names in lists.items()]
    # the last one goes with any callback
    engines = sorted(GROUPS["engine"], key=lambda name: name == "auto")
    walks = [
        [f"engine={name}" for name in engines],
        [f"communication={name}" for name in GROUPS["communication"]],
        [f"launcher={name}" for name in GROUPS["launcher"]],
    ]
    *rows, last = itertools.zip_longest(*walks)
    for typed in (*rows, (*last, *several)):
        config = composed(*start, *filter(None, typed)).config
        assert config["task"]["_target_"] == task.get("task", task)["_target_"]
    assert set(GROUPS) == {*PARTS, *SEVERAL, "communication", "engine", "launcher", "trainer"}
