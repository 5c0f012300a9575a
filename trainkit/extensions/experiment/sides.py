"""A side of an experiment: a config, overrides of one, or a script; and what two sides must share."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.callbacks import ModelCheckpoint
from trainkit.callbacks.early_stopping import EarlyStopping
from trainkit.config import compose
from trainkit.config.compose import ComposedJob
from trainkit.config.resources import conf_folders
from trainkit.errors import ConfigError, did_you_mean
from trainkit.extensions.plan.planned import planned
from trainkit.extensions.script.command_line import Script, check_script, split_script
from trainkit.extensions.script.running import FirstFit, run_script
from trainkit.extensions.script.subject import ConfigSubject, ScriptSubject, Subject

_NO_LAUNCHER = "launcher=none"
_TRAINKIT = Path(__file__).parents[2]
_YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class Side:
    """A side that was looked at.

    Attributes:
        name: "a" or "b".
        typed: as typed.
        subject: what its runs are started from.
        contract: what must be equal on both sides, by name.
        monitored: what its callbacks monitor: (value, mode), or None.
        digest: of its config, or of its script's text: seeds that ran before are of the same one.
        files: digests of the user's own modules that the fit has imported, by their paths.
    """

    name: str
    typed: str
    subject: Subject
    contract: dict[str, Any]
    monitored: tuple[str, str] | None
    digest: str
    files: Mapping[str, str] = field(default_factory=dict)


def look_at_side(name: str, typed: str, shared: Sequence[str]) -> Side:
    """Compose a side's config or run its script up to its fit; nothing is trained.

    Args:
        name: "a" or "b".
        typed: a config's file or name, overrides, or a script with its arguments.
        shared: overrides of both sides, conf=NAME among them.

    Raises:
        ConfigError: it is none of these, or is refused.
    """
    parts = shlex.split(typed)
    before, script = split_script(parts)
    if script is not None:
        check_script("experiment", script, [*before, *shared], ())
        return _of_script(name, typed, script)
    return _of_config(name, typed, [*_overrides(parts, typed), *shared])


def _overrides(parts: Sequence[str], typed: str) -> list[str]:
    """Return the overrides of a side, of a config's file its name."""
    if len(parts) == 1 and parts[0].endswith(_YAML):
        path = Path(parts[0])
        known = [each.stem for folder in conf_folders(Path.cwd()) for each in folder.glob("*.yaml")]
        if path.stem not in known:
            raise ConfigError(
                f"There is no config {path.name} in conf/.{did_you_mean(path.stem, known)} A side"
                " is a file of conf/ (a.yaml), a script (mine.py), or overrides in one pair of"
                " quotes ('optimizer=adamw')."
            )
        return [f"conf={path.stem}"]
    if not all("=" in word or word.startswith("~") for word in parts) or not parts:
        raise ConfigError(
            f"'{typed}' is not a side: give a config's file (a.yaml), a script ('mine.py --width"
            " 64'), or overrides of conf=NAME ('optimizer=adamw')."
        )
    return list(parts)


def _of_config(name: str, typed: str, overrides: list[str]) -> Side:
    typed_launcher = [word for word in overrides if word.lstrip("+~").startswith("launcher")]
    if typed_launcher and typed_launcher != [_NO_LAUNCHER]:
        raise ConfigError(
            f"'{typed_launcher[0]}' is for fit; experiment starts its runs on this machine. Leave it"
            " out."
        )
    if not typed_launcher:  # the launcher of a config's file is one for fit, too
        overrides = [*overrides, _NO_LAUNCHER]
    jobs: list[ComposedJob] = []
    compose.run("fit", overrides, True, jobs.append)
    (job,) = jobs
    subject = ConfigSubject(job, overrides)
    config = {key: value for key, value in job.config.items() if key != "run_dir"}
    return _side(name, typed, subject, json.dumps(config, sort_keys=True, default=str))


def _of_script(name: str, typed: str, script: Script) -> Side:
    sides: list[Side] = []

    def look(requested: Any, _: Any) -> None:
        subject = ScriptSubject(script, requested, "")
        sides.append(_side(name, typed, subject, Path(script.path).read_text()))

    run_script(script, FirstFit(script, look))
    return sides[0]


def _side(name: str, typed: str, subject: Subject, text: str) -> Side:
    with tempfile.TemporaryDirectory() as folder, planned(subject, folder) as plan:
        run = plan.run
        limits = run.options.limits
        source: Any = getattr(run.train_feed, "source", None)
        data = getattr(source, "dataset", None)
        contract = {
            "global batch": run.batch_plan.global_batch_size,
            "data set": "a stream" if data is None else type(data).__name__,
            "samples of an epoch": None if source is None else source.num_samples,
            "max_epochs": limits.max_epochs,
            "steps": run.total_steps,
            "validation": run.evaluator.has_data,
        }
        monitored = next(
            (
                (str(each.monitor), str(each.mode))
                for each in plan.callbacks
                if isinstance(each, (ModelCheckpoint, EarlyStopping)) and each.monitor
            ),
            None,
        )
    return Side(name, typed, subject, contract, monitored, _digest(text), _own_files())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _own_files() -> dict[str, str]:
    """Return digests of the modules below the current folder, by their paths in it; without those
    of an environment that is there, and of trainkit.
    """
    here = Path.cwd()
    others = [Path(folder) for folder in (sys.prefix, _TRAINKIT)]
    files: dict[str, str] = {}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "")
        if path.suffix != ".py" or not path.is_relative_to(here) or not path.is_file():
            continue
        if not any(path.is_relative_to(folder) for folder in others):
            files[str(path.relative_to(here))] = _digest(path.read_text(errors="replace"))
    return files


def check_contract(a: Side, b: Side) -> None:
    """Refuse two sides that are not the same problem.

    Raises:
        ConfigError: names what differs, with both values.
    """
    for key, value in a.contract.items():
        if value != b.contract[key]:
            raise ConfigError(
                f"The two sides are not the same problem: {key} is {value} of a ({a.typed}) and"
                f" {b.contract[key]} of b ({b.typed}). A difference of their values would not be"
                " that of what you compare: make it equal on both sides."
            )


def metric_of(a: Side, b: Side, metric: str | None, mode: str | None) -> tuple[str, str]:
    """Return the value that is compared, and which of it is better.

    Raises:
        ConfigError: it is not known, or the sides monitor different ones.
    """
    if metric is None:
        if a.monitored and b.monitored and a.monitored != b.monitored:
            raise ConfigError(
                f"The two sides are not the same problem: the metric is {' '.join(a.monitored)} of"
                f" a ({a.typed}) and {' '.join(b.monitored)} of b ({b.typed}). Say which:"
                f" metric={a.monitored[0]} mode={a.monitored[1]}."
            )
        known = a.monitored or b.monitored
        if known is None:
            raise ConfigError(
                "metric is missing: no callback of the two sides monitors a value. Give the logged"
                " value to compare, as metric=val/loss mode=min."
            )
        return known[0], mode or known[1]
    modes = [side.monitored[1] for side in (a, b) if side.monitored and side.monitored[0] == metric]
    if mode is None and not modes:
        raise ConfigError(
            f"mode is missing: is a smaller {metric} better (mode=min) or a larger one (mode=max)?"
        )
    return metric, mode or modes[0]
