"""lm-eval behind the wall: the only home of lm_eval (trainkit[lm_eval])."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from trainkit.errors import ConfigError, DataError, did_you_mean

_FILES = (".yaml", ".yml")


@dataclass(frozen=True)
class Results:
    """What lm-eval has computed.

    Attributes:
        table: as lm-eval prints it.
        tasks: task or group -> its values by lm-eval's names, as "acc,none", with the number of
            samples, of shots, and the version of the task.
        versions: of the packages.
    """

    table: str
    tasks: dict[str, dict[str, Any]]
    versions: dict[str, str]


class Tasks(TaskManager):  # type: ignore[misc]
    """lm-eval's tasks, with errors that name the task."""

    def load(self, task_list: Any) -> Any:
        """Return the tasks, with their data.

        Raises:
            DataError: one cannot be loaded.
        """
        try:
            return super().load(task_list)
        except Exception as error:  # of a task's code and data: anything
            first = next(iter(str(error).strip().splitlines()), "")
            raise DataError(
                f"tasks is {', '.join(map(str, task_list))}, and lm-eval cannot load it:"
                f" {type(error).__name__}: {first} The data of its own tasks comes from the hub;"
                " a file of a task may name files here: dataset_path: json, dataset_kwargs:"
                " {data_files: {test: my.jsonl}}."
            ) from error


def find_tasks(names: Sequence[str], include_path: str | None) -> Tasks:
    """Return lm-eval's list of tasks; its own 14,000 are read only if a name asks for them.

    Raises:
        ConfigError: a name is that of none.
    """
    named = [name for name in names if not name.endswith(_FILES)]
    manager = Tasks(include_path=include_path, include_defaults=False)
    if {*named} <= {*manager.all_tasks}:
        return manager
    manager = Tasks(include_path=include_path)
    for name in named:
        if name not in manager.all_tasks:
            raise ConfigError(
                f"tasks has '{name}', which lm-eval lacks.{did_you_mean(name, manager.all_tasks)}"
                " `lm-eval ls tasks` lists its tasks; a task of yours is a .yaml file."
            )
    return manager


def evaluate(
    folder: Path, names: Sequence[str], manager: Tasks, settings: dict[str, Any]
) -> Results:
    """Return what `lm-eval run --model hf` computes for a folder of transformers.

    Args:
        settings: limit, num_fewshot, batch_size, apply_chat_template; see lm_eval.simple_evaluate.
    """
    results: Any = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder)},
        tasks=[*names],
        task_manager=manager,
        device="cuda" if torch.cuda.is_available() else "cpu",
        log_samples=False,
        **settings,
    )
    tables = [make_table(results)] + (
        [make_table(results, "groups")] if results.get("groups") else []
    )
    every = {**results["results"], **results.get("groups", {})}
    return Results(
        "\n".join(tables).rstrip(),
        {name: _about(name, values, results) for name, values in every.items()},
        {name: version(name) for name in ("lm_eval", "transformers", "torch")},
    )


def _about(name: str, values: dict[str, Any], results: Any) -> dict[str, Any]:
    """Return a task's values, and what they are of."""
    samples = results.get("n-samples", {}).get(name, {})
    about = {
        "samples": samples.get("effective"),
        "num_fewshot": results.get("n-shot", {}).get(name),
        "version": results.get("versions", {}).get(name),
    }
    plain = {key: value for key, value in values.items() if isinstance(value, (int, float))}
    plain.pop("sample_len", None)
    return {"values": plain} | {key: value for key, value in about.items() if value is not None}
