"""Choices that exclude each other: data that a task cannot take, and settings that a part lacks.

check_batches    before interpolations are resolved, by the shapes that both classes declare:
                 neither an interpolation without its key nor a traceback of the first step
with_origin      names the choice whose file sets what another choice does not have
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.config.of_run import read_config
from trainkit.config.signature import class_attribute
from trainkit.errors import ConfigError

_NAME = "batch_shape"


def check_batches(
    config: Mapping[str, Any],
    choices: Mapping[str, Any],
    folders: Sequence[Path],
) -> None:
    """Compare the batches of `data` with those of `task`, if both declare theirs.

    Args:
        config: not resolved.
        choices: of groups, group -> name; a part that a config writes itself has none.
        folders: of configs, for the choices that would match.

    Raises:
        ConfigError: they differ.
    """
    data, task = config.get("data"), config.get("task")
    yields, takes = batch_shape(data), batch_shape(task)
    if yields is None or takes is None or yields == takes:
        return
    groups: dict[str, Any] = {group: _nodes(group, folders) for group in ("data", "task")}
    remedies = [*_matching("data", takes, groups), *_matching("task", yields, groups)]
    choose = f" Choose {' or '.join(remedies)}." if remedies else ""
    nodes = {"data": data, "task": task}
    files = {group: groups[group].get(choices.get(group)) for group in nodes}
    names = [_named(group, node, files[group]) for group, node in nodes.items()]
    shapes = f"the data yields {yields}, the task takes {takes}"
    raise ConfigError(f"{' and '.join(names)} exclude each other: {shapes}.{choose}")


def with_origin(text: str, choices: Mapping[str, Any], folders: Sequence[Path]) -> str:
    """Return the text of an error; if it is about a setting that another choice made, name both.

    `augment=a3` sets data.augment, for example, which data=ray does not have.
    """
    absent = re.match(r"((\w+)\.(\w+)) is not a setting", text)
    if absent is None:
        return text
    key, group, name = absent.groups()
    for other, choice in choices.items():
        node = _content(other, choice, folders).get(group)
        if other != group and isinstance(node, dict) and name in node:
            pair = f"{group}={choices.get(group)} and {other}={choice} exclude each other"
            return f"{pair}: {other}={choice} sets {key}. {text}"
    return text


def _named(group: str, node: Any, chosen: Any) -> str:
    """Return `group=NAME`, or the class if it is not that of the chosen file."""
    is_of_file = chosen is not None and chosen["_target_"] == node["_target_"]
    return f"{group}={chosen['name']}" if is_of_file else f"{group}._target_={node['_target_']}"


def batch_shape(node: Any) -> str | None:
    """Return what the class of a node declares as its `batch_shape`; None if it declares none."""
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        return None
    shape = class_attribute(node["_target_"], _NAME)
    if isinstance(shape, dict):
        given = [text for name, text in shape.items() if name and node.get(name) is not None]
        shape = given[0] if given else shape.get("")
    return shape if isinstance(shape, str) else None


def _content(group: str, choice: Any, folders: Sequence[Path]) -> dict[str, Any]:
    """Return what a choice's file holds; nothing if there is no such file."""
    paths = [folder / group / f"{choice}.yaml" for folder in folders]
    return next((read_config(path) for path in paths if path.is_file()), {})


def _nodes(group: str, folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return the nodes of a group's files by name, each with its own name."""
    paths = [path for folder in reversed(folders) for path in folder.glob(f"{group}/*.yaml")]
    files = {path.stem: read_config(path) for path in paths}
    nodes = {name: file.get(group, file) for name, file in sorted(files.items())}
    return {name: {"_target_": None} | node | {"name": name} for name, node in nodes.items()}


def _matching(group: str, shape: str, groups: Mapping[str, Any]) -> Iterator[str]:
    """Yield `group=a|b`, the choices whose class declares a shape."""
    names = [name for name, node in groups[group].items() if batch_shape(node) == shape]
    if names:
        yield f"{group}={'|'.join(names)}"
