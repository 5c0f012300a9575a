"""evaluate: a run's causal model, or a folder of transformers, by a suite of tasks."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.cli.as_json import facts_printed, split_json
from trainkit.cli.guard import guarded, main_alone
from trainkit.cli.options import count, read_keys, trusted_modules
from trainkit.cli.usage import help_text
from trainkit.console import short
from trainkit.errors import ConfigError, did_you_mean
from trainkit.extensions.exporting.places import default_checkpoint, has_checkpoints
from trainkit.extensions.suites.usage import USAGE
from trainkit.launch.environment import Launcher, read_launcher

_KEYS = USAGE.keys()
_SUITES = ("lm-eval",)


def main(command: str, arguments: Sequence[str]) -> int:
    """Evaluate RUN_DIR suite=lm-eval tasks=...; return the exit code."""
    launcher = read_launcher()
    if launcher.world_size > 1 and not {"-h", "--help"} & {*arguments}:
        return guarded(lambda: _refuse_ranks(launcher), launcher)
    arguments, as_json = split_json(arguments)

    def work() -> None:
        facts.update(_work(arguments))

    with facts_printed(as_json) as facts:
        return main_alone(arguments or ["--help"], help_text(command, USAGE), work)


def _refuse_ranks(launcher: Launcher) -> None:
    raise ConfigError(
        f"evaluate runs in one process, and {launcher.name} has started {launcher.world_size}."
        " Start it alone: python -m trainkit evaluate RUN_DIR suite=lm-eval tasks=..."
    )


def _work(arguments: Sequence[str]) -> dict[str, Any]:
    """Evaluate; return what --json prints. torch is imported here, after all checks."""
    given, settings = _read(arguments)
    path = Path(given["of"])
    harness: Any = importlib.import_module("trainkit.extensions.suites.harness")
    evaluated: Any = importlib.import_module("trainkit.extensions.suites.evaluated")
    manager = harness.find_tasks(given["tasks"], settings.pop("include_path"))
    with evaluated.opened(path, given["ckpt_path"], given["trust"]) as model:
        print(model.line, flush=True)
        results = harness.evaluate(model.folder, given["tasks"], manager, settings)
    print(f"\n{results.table}", flush=True)
    facts = {
        "of": str(path),
        "suite": given["suite"],
        "checkpoint": model.checkpoint,
        "settings": settings,
        "versions": results.versions,
        "tasks": results.tasks,
        "file": None,
    }
    if model.checkpoint is not None:
        file = evaluated.write_results(path, facts)
        facts["file"] = str(file)
        print(f"results     {short(file)}", flush=True)
    return facts


def _read(arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is evaluated, and lm-eval's settings; checked as far as possible without torch."""
    if "=" in arguments[0]:
        raise ConfigError(
            f"The run's folder comes first, before {arguments[0]}: evaluate RUN_DIR suite=lm-eval"
            " tasks=..."
        )
    of = arguments[0]
    given = read_keys(arguments[1:], _KEYS, "evaluate")
    for key in ("suite", "tasks"):
        if key not in given:
            raise ConfigError(f"{key} is missing; write {key}=VALUE: {_KEYS[key]}.")
    if given["suite"] not in _SUITES:
        near = did_you_mean(given["suite"], _SUITES)
        raise ConfigError(f"suite is '{given['suite']}'; it must be {' or '.join(_SUITES)}.{near}")
    path = Path(of)
    is_run = has_checkpoints(path)
    if not is_run and not (path / "config.json").is_file():
        raise ConfigError(
            f"{of} is neither a run (it has no checkpoints/) nor a folder of transformers (it has"
            " no config.json). Give one of them."
        )
    for key in ("ckpt_path", "trust"):
        if key in given and not is_run:
            raise ConfigError(
                f"{key} is {given[key]}, which has no effect: {of} is a folder of transformers, not"
                " a run. Leave it out."
            )
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "suite=lm-eval needs lm_eval, which is not installed. Install: pip install"
            " 'trainkit[lm_eval]'"
        )
    what = {
        "of": of,
        "suite": given["suite"],
        "tasks": _tasks(given["tasks"]),
        "ckpt_path": given.get("ckpt_path", default_checkpoint(of)),
        "trust": trusted_modules(given),
    }
    return what, _settings(given)


def _tasks(text: str) -> list[str]:
    """Return the names of tasks and the files.

    Raises:
        ConfigError: there is none, or a file is not there.
    """
    tasks = [name.strip(" '\"") for name in text.strip("[]").split(",") if name.strip()]
    if not tasks:
        raise ConfigError(f"tasks is '{text}'; it must be {_KEYS['tasks']}.")
    for name in tasks:
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            raise ConfigError(
                f"tasks has '{name}', and there is no such file. Give a file of an lm-eval task, or"
                " the name of one."
            )
    return tasks


def _settings(given: dict[str, str]) -> dict[str, Any]:
    """Return the settings that are lm-eval's, by its names."""
    folder = given.get("include_path")
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"include_path is '{folder}', and there is no such folder.")
    size = given.get("batch_size", "1")
    chat = given.get("apply_chat_template", "false")
    if chat not in ("true", "false"):
        raise ConfigError(f"apply_chat_template is '{chat}'; it must be true or false.")
    shots = given.get("num_fewshot")
    return {
        "include_path": folder,
        "limit": _limit(given["limit"]) if "limit" in given else None,
        "num_fewshot": None if shots is None else count("num_fewshot", shots, least=0),
        "batch_size": size if size == "auto" else count("batch_size", size),
        "apply_chat_template": chat == "true",
    }


def _limit(text: str) -> int | float:
    """Return a number of samples, or a share of them."""
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ConfigError(
            f"limit is '{text}'; it must be a number of samples, 1 or more, or a share below 1."
        )
    return share
