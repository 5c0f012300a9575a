"""experiment: two variants of a training, compared seed by seed."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.cli.as_json import facts_printed, json_text, split_json
from trainkit.cli.guard import main_alone
from trainkit.cli.options import count
from trainkit.cli.usage import help_text
from trainkit.errors import ConfigError, did_you_mean
from trainkit.extensions.experiment.usage import USAGE
from trainkit.extensions.programs.local import launcher_of, pretend
from trainkit.extensions.script.own_options import refuse_launcher, split_own
from trainkit.launch.environment import read_launcher

_OWN = ("seeds", "budget", "metric", "mode", "ranks", "run_dir")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


@dataclass(frozen=True)
class ExperimentRequest:
    """The command line's request; see usage.py."""

    sides: tuple[str, str]
    shared: tuple[str, ...]
    seeds: int
    budget_s: float | None
    metric: str | None
    mode: str | None
    ranks: int
    folder: Path


def main(command: str, arguments: Sequence[str]) -> int:
    """Compare A and B; return the exit code."""
    given, as_json = split_json(arguments)
    with facts_printed(as_json) as facts:
        return main_alone(
            given or ["--help"], help_text(command, USAGE), lambda: _work(given, facts)
        )


def read_request(arguments: Sequence[str]) -> ExperimentRequest:
    """Return what the arguments ask for.

    Raises:
        ConfigError: they are not legal.
    """
    own, rest = split_own(arguments, _OWN)
    if flag := next((word for word in rest if word in ("-m", "--multirun")), None):
        raise ConfigError(f"experiment compares two sides: leave {flag} out.")
    sides = [word for word in rest if not word.startswith("conf=")]
    if len(sides) < 2:
        raise ConfigError(
            f"experiment compares two sides, and {len(sides)} are given. Give a config (a.yaml), a"
            " script ('mine.py --width 64') or overrides of conf= ('optimizer=adamw') for each."
        )
    a, b, *more = sides
    if a == b:
        raise ConfigError(f"Both sides are '{a}': there is nothing to compare.")
    shared = (*(word for word in rest if word.startswith("conf=")), *more)
    if strange := [word for word in shared if "=" not in word and not word.startswith("~")]:
        raise ConfigError(
            f"'{strange[0]}' is a third side; experiment compares two.{did_you_mean(strange[0], _OWN)}"
            " A script with arguments is one side in quotes: 'mine.py --width 64'."
        )
    mode = own.get("mode")
    if mode not in (None, "min", "max"):
        raise ConfigError(f"mode is '{mode}'; it must be min or max.")
    name = re.sub(r"[^\w.=+-]+", "_", f"{a}-{b}")[:80]
    return ExperimentRequest(
        (a, b),
        shared,
        count("seeds", own.get("seeds", "3")),
        None if "budget" not in own else seconds(own["budget"]),
        own.get("metric"),
        mode,
        count("ranks", own.get("ranks", "1")),
        Path(own.get("run_dir") or f"runs/experiment/{name}"),
    )


def seconds(text: str) -> float:
    """Return a budget in seconds.

    Raises:
        ConfigError: it is not a number above 0 with s, m or h.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if value <= 0:
        raise ConfigError(f"budget is '{text}'; it must be a time above 0, as 300s, 10m or 2h.")
    return value


def _work(arguments: Sequence[str], facts: dict[str, Any]) -> None:
    """Run the seeds and report. torch is imported here, after all checks of the arguments."""
    asked = read_request(arguments)
    started = read_launcher()
    refuse_launcher("experiment", started, f"ranks={started.world_size}")
    sides: Any = importlib.import_module("trainkit.extensions.experiment.sides")
    runs: Any = importlib.import_module("trainkit.extensions.experiment.seeds")
    report: Any = importlib.import_module("trainkit.extensions.experiment.report")
    statistics: Any = importlib.import_module("trainkit.extensions.experiment.statistics")
    statistics.require()
    pretend(asked.ranks, asked.ranks, launcher_of("auto"))
    a, b = (
        sides.look_at_side(name, typed, asked.shared)
        for name, typed in zip(("a", "b"), asked.sides, strict=True)
    )
    sides.check_contract(a, b)
    metric, mode = sides.metric_of(a, b, asked.metric, asked.mode)
    seeds = runs.Seeds(a, b, asked.folder.absolute(), asked.ranks, asked.budget_s)
    seeds.claim()
    pairs = []
    for pair in seeds.run(asked.seeds):
        pair.values(metric)  # a value that is not logged ends it after one seed
        pairs.append(pair)
    if not pairs:
        raise ConfigError(
            f"budget is {asked.budget_s:g} s, in which not one seed of both sides has run. Give"
            " more, or fewer steps."
        )
    shared = {**a.contract, "metric": metric, "ranks": asked.ranks}
    result = report.ComparedConfigs(
        a.typed,
        b.typed,
        metric,
        mode,
        pairs,
        seeds.left_out,
        shared,
    )
    facts |= report.show(result, asked.folder)
    numbers = asked.folder / "reports" / "experiment.json"
    numbers.write_text(json_text(facts))
