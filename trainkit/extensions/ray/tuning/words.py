"""The words of a search: search.KEY=FUNCTION(...) and the settings search.NAME=VALUE.

Read without Ray, so that a mistake is reported at once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.errors import ConfigError, did_you_mean
from trainkit.extensions.ray.options import resources_of

PREFIX = "search."
# function -> (its arguments, the least number of them, the largest or None)
FUNCTIONS: dict[str, tuple[str, int, int | None]] = {
    "uniform": ("low, high", 2, 2),
    "loguniform": ("low, high", 2, 2),
    "quniform": ("low, high, step", 3, 3),
    "randint": ("low, high (excluded)", 2, 2),
    "lograndint": ("low, high (excluded)", 2, 2),
    "normal": ("mean, deviation", 2, 2),
    "choice": ("value, ...", 1, None),
    "grid": ("value, ...", 1, None),
}
SCHEDULERS = ("asha", "pbt", "none")
_EXAMPLE = "search.optimizer.lr=loguniform(1e-4,1e-1)"
_CALL = re.compile(r"([A-Za-z_]\w*)\((.*)\)", re.DOTALL)


@dataclass(frozen=True)
class Drawn:
    """How a key's values are drawn: one of FUNCTIONS, with its arguments."""

    function: str
    arguments: tuple[Any, ...]

    def example(self) -> Any:
        """Return a value that may be drawn."""
        if self.function == "quniform" and isinstance(self.arguments[2], int):
            return int(self.arguments[0])
        return self.arguments[0]


@dataclass(frozen=True)
class SearchSettings:
    """The settings of a search. Those that are None have a default that depends on the config, or
    on Ray.

    Attributes:
        num_samples: trials; with grid(...) so many for each of its combinations. By default 8, and
            1 if all keys have a grid, of which a second run would be the same.
        metric: the logged value that compares trials; by default what a callback of the config
            monitors.
        mode: "min" or "max".
        scheduler: asha ends bad trials early, pbt copies good trials over bad ones, none lets all
            end.
        max_concurrent: trials at a time; by default as many as the cluster has resources for.
        num_workers: ranks of a trial.
        resources: of each rank, as {"CPU": 1, "GPU": 1}.
        seed: of the draws.
        grace_period: epochs that asha leaves each trial; 1 by default, or of a run that is limited
            by steps a tenth of them.
        reduction_factor: asha continues one of so many trials at each of its looks.
        interval: epochs between two exchanges of pbt; 1 by default, and of a run that is limited by
            steps each validation exchanges.
    """

    num_samples: int = 8
    metric: str | None = None
    mode: str | None = None
    scheduler: str = "asha"
    max_concurrent: int | None = None
    num_workers: int = 1
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    seed: int = 0
    grace_period: int | None = None
    reduction_factor: int = 3
    interval: int | None = None


_COUNTS = ("num_samples", "max_concurrent", "num_workers", "grace_period", "interval")
_NAMES = tuple(SearchSettings.__dataclass_fields__)
_OF_SCHEDULERS = {"grace_period": "asha", "reduction_factor": "asha", "interval": "pbt"}


def read_search(arguments: Sequence[str]) -> tuple[SearchSettings, dict[str, Drawn], list[str]]:
    """Return the settings, how each searched key is drawn, and the words that are no search's: the
    config's own.

    Raises:
        ConfigError: a function or a setting is unknown, or its value is not legal.
    """
    settings: dict[str, Any] = {}
    space: dict[str, Drawn] = {}
    others = [word for word in arguments if not word.startswith(PREFIX)]
    for word in arguments:
        if word in others:
            continue
        key, equals, value = word.removeprefix(PREFIX).partition("=")
        if not equals or not value:
            raise ConfigError(
                f"'{word}' has no value; write search.KEY=FUNCTION(...), as {_EXAMPLE}."
            )
        if key in space or key in settings:
            raise ConfigError(f"search.{key} is given twice. Leave one out.")
        if key in _NAMES:
            settings[key] = _setting(key, value)
        else:
            space[key] = _drawn(key, value)
    if not space:
        raise ConfigError(
            f"There is nothing to search: give a key and how its values are drawn, as {_EXAMPLE} or"
            " search.data.batch_size=choice(16,32,64)."
        )
    fixed = {word.lstrip("+").partition("=")[0] for word in others}
    for key in space:
        if key in fixed:
            raise ConfigError(
                f"{key} is searched by search.{key}, and set by {key}=... too. Leave one out."
            )
    if all(drawn.function == "grid" for drawn in space.values()):
        settings.setdefault("num_samples", 1)
    read = SearchSettings(**settings)
    for name, scheduler in _OF_SCHEDULERS.items():
        if name in settings and read.scheduler != scheduler:
            raise ConfigError(
                f"search.{name} is {settings[name]}, and search.scheduler is {read.scheduler}: it"
                f" has no effect there. It is a setting of {scheduler}: leave it out, or set"
                f" search.scheduler={scheduler}."
            )
    return read, space, others


def _setting(key: str, value: str) -> Any:
    legal: str
    parsed: Any
    if key in _COUNTS or key == "seed":
        least = 0 if key == "seed" else 1
        legal = f"a whole number, {least} or more"
        parsed = int(value) if value.isdecimal() and int(value) >= least else None
    elif key == "reduction_factor":
        legal = "a whole number, 2 or more"
        parsed = int(value) if value.isdecimal() and int(value) >= 2 else None
    elif key == "scheduler":
        legal = f"one of {', '.join(SCHEDULERS)}"
        parsed = value if value in SCHEDULERS else None
    elif key == "mode":
        legal = "min or max"
        parsed = value if value in ("min", "max") else None
    elif key == "resources":
        legal = "resources of a rank with numbers above 0, as {CPU: 1, GPU: 0.5}"
        parsed = _resources(value)
    else:
        return value
    if parsed is None:
        raise ConfigError(
            f"search.{key} is '{value}'; it must be"
            f" {legal}.{did_you_mean(value, SCHEDULERS) if key == 'scheduler' else ''}"
        )
    return resources_of(f"search.{key}", parsed) if key == "resources" else parsed


def _resources(text: str) -> dict[str, float] | None:
    pairs = [part.partition(":") for part in text.strip(" {}").split(",")]
    try:
        amounts = {name.strip(" '\""): float(number) for name, _, number in pairs}
    except ValueError:
        return None
    return amounts if all(name and number > 0 for name, number in amounts.items()) else None


def _drawn(key: str, value: str) -> Drawn:
    call = _CALL.fullmatch(value.strip())
    if call is None:
        near = did_you_mean(key, _NAMES)
        raise ConfigError(
            f"search.{key} is '{value}'; a searched key has a function ({', '.join(FUNCTIONS)}), as"
            f" {_EXAMPLE}; and the settings of a search are {', '.join(_NAMES)}.{near}"
        )
    name, inner = call.groups()
    if name not in FUNCTIONS:
        raise ConfigError(
            f"search.{key} is '{value}', and there is no function"
            f" '{name}'.{did_you_mean(name, FUNCTIONS)} There are "
            f"{', '.join(f'{known}({arguments})' for known, (arguments, _, _) in FUNCTIONS.items())}."
        )
    arguments = tuple(_value(part) for part in _parts(inner))
    explained, least, most = FUNCTIONS[name]
    if len(arguments) < least or (most is not None and len(arguments) > most):
        raise ConfigError(f"search.{key} is '{value}'; the arguments of {name} are ({explained}).")
    if most is not None:
        _check_range(key, value, name, arguments)
    return Drawn(name, arguments)


def _check_range(key: str, value: str, name: str, arguments: tuple[Any, ...]) -> None:
    kinds = int if name in ("randint", "lograndint") else (int, float)
    if any(isinstance(a, bool) or not isinstance(a, kinds) for a in arguments):
        raise ConfigError(
            f"search.{key} is '{value}'; the arguments of {name} must be"
            f" {'whole ' * (kinds is int)}numbers."
        )
    if name != "normal" and arguments[0] >= arguments[1]:
        raise ConfigError(f"search.{key} is '{value}'; the first number must be below the second.")
    if name.startswith("log") and arguments[0] <= 0:
        raise ConfigError(f"search.{key} is '{value}'; {name} needs numbers above 0.")


def _parts(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes."""
    parts = []
    depth = 0
    quote = ""
    start = 0
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def _value(text: str) -> Any:
    known = {"null": None, "true": True, "false": False}
    if text in known:
        return known[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a word, as adamw
