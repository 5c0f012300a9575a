"""The config of an existing run as the start of another command: `validate run_dir=runs/mine` needs
no `conf=`.

The run's own file becomes Hydra's primary config. A group that the command line replaces
(`data=digits`) is left out of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from trainkit.config.roles import role_of
from trainkit.config.yaml_file import check_yaml, unreadable
from trainkit.errors import ConfigError
from trainkit.extension import with_current_names
from trainkit.safety.masking import masked_arguments

EVALUATIONS = ("validate", "test", "predict")
# The start of a run, and what only the command line may give; a command on the run's results has
# its own.
_NOT_TAKEN = ("ckpt_path", "resume", "init_weights", "strict", "table", "trust", "launcher")
_NOT_COMPARED = (*_NOT_TAKEN, "run_dir", "conf", "logger")
_NAME = "run"
OVERRIDES = ".hydra/overrides.yaml"


@dataclass(frozen=True)
class Primary:
    """The config that Hydra starts from.

    Attributes:
        folder: where it is.
        name: its file's name, without ".yaml".
        conf: the value of the key `conf`.
        overrides: those of the command line, and what follows from the run.
        saved: the resolved config of the run, if there is one.
        typed: the overrides of the run's earlier starts.
        is_of_a_run: whether it is the run's own config, which may have come with the folder from
            anyone.
    """

    folder: Path
    name: str
    conf: str
    overrides: list[str]
    saved: dict[str, Any] | None = None
    typed: Sequence[str] = ()
    is_of_a_run: bool = False


def primary_of(
    command: str, conf: str | None, overrides: Sequence[str], folders: Sequence[Path], scratch: Path
) -> Primary | None:
    """Return the primary config if the command line names an existing run to evaluate or to resume,
    or None.

    Args:
        command: "fit", "validate", ...
        conf: the config named at the command line. Another one than the run's replaces it.
        overrides: of the command line.
        folders: of configs.
        scratch: an empty folder to write to.

    Raises:
        ConfigError: the run's config cannot be read, or there is none and no `conf`.
    """
    given = dict(override.partition("=")[::2] for override in overrides)
    run_dir = _run_of(given)
    if run_dir is None and conf is None and "run_dir" in given:
        raise ConfigError(
            f"run_dir is '{given['run_dir']}', which holds no config.yaml of a run. Give the folder"
            " of a run, or conf=NAME."
        )
    if run_dir is None or (command not in EVALUATIONS and conf is not None):
        return None
    saved = read_config(run_dir / "config.yaml")
    name = str(saved.get("conf", "run"))
    overrides = [*overrides, *([] if "run_dir" in given else [f"run_dir={run_dir}"])]
    if command in EVALUATIONS and "ckpt_path" not in given:
        overrides.append(f"ckpt_path={_best(command, run_dir, saved)}")
    other = name if conf is None else conf.removesuffix(".yaml")
    if other != name:
        is_known = any((folder / f"{other}.yaml").is_file() for folder in folders)
        return Primary(folders[0], other, other, overrides, saved) if is_known else None
    unresolved = run_dir / ".hydra" / "config.yaml"
    text = read_config(unresolved) if unresolved.is_file() else saved
    replaced = [key for key in given if any((folder / key).is_dir() for folder in folders)]
    saved_config = {
        key: value for key, value in text.items() if key not in _NOT_TAKEN and key not in replaced
    }
    saved_config["defaults"] = ["_self_", *({group: None} for group in replaced)]
    (scratch / f"{_NAME}.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(saved_config)))
    return Primary(scratch, _NAME, name, overrides, saved, _typed_for(run_dir), is_of_a_run=True)


def changes(saved: Mapping[str, Any] | None, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return "key: value of the run -> value now" for each key that differs,
    or nothing without a run.
    """
    if saved is None:
        return ()
    before, now = (
        flat({k: v for k, v in values.items() if k not in _NOT_COMPARED})
        for values in (saved, config)
    )
    keys = [
        key
        for key in dict.fromkeys([*before, *now])
        if before.get(key, _NONE) != now.get(key, _NONE)
    ]
    return tuple(f"{key}: {before.get(key, _NONE)} -> {now.get(key, _NONE)}" for key in keys)


_NONE = "(not set)"


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return {"optimizer.lr": 0.1, ...}."""
    if isinstance(values, Mapping):
        return {
            key: value
            for name, part in values.items()
            for key, value in flat(part, f"{prefix}.{name}").items()
        }
    return {prefix.lstrip("."): values}


def _run_of(given: Mapping[str, str]) -> Path | None:
    """Return the folder of the run that run_dir or ckpt_path names, if it holds a config."""
    checkpoint = given.get("ckpt_path", "").strip("'\"")
    if "run_dir" in given:
        folder = Path(given["run_dir"].strip("'\""))
    elif re.search(r"/checkpoints/[^/]+/?$", checkpoint):
        folder = Path(checkpoint).parent.parent
    else:
        return None
    # a name that is too long is no file, and refused where the run's folder is made
    return folder if os.path.isfile(folder / "config.yaml") else None


def _best(command: str, run_dir: Path, saved: Mapping[str, Any]) -> str:
    """Return which checkpoint of a run is evaluated: best, or last if there is none.

    Raises:
        ConfigError: the run has none, and its config names no other place of them.
    """
    for name in ("best", "last"):
        if (run_dir / "checkpoints" / name).exists():
            return name
    if dirpaths_of(saved):
        return "best"  # its callbacks find it, or say what is there
    raise ConfigError(
        f"The run in '{run_dir}' has left no checkpoint, so there are no trained weights to {command}."
        " Give another: ckpt_path=PATH, a checkpoint or a file of weights; or ckpt_path=null for the"
        " weights that the Task begins with."
    )


def dirpaths_of(config: Mapping[str, Any]) -> list[str]:
    """Return the folders and URLs that a config's callbacks save checkpoints in."""
    nodes = config.get("callbacks")
    return [
        os.path.expanduser(str(node["dirpath"]))
        for node in (nodes.values() if isinstance(nodes, Mapping) else ())
        if role_of(node) == "checkpoints" and node.get("dirpath")
    ]


def read_overrides(run_dir: Path) -> dict[str, str]:
    """Return the settings typed for a run, key -> text, without "++";
    empty if its folder holds none.
    """
    lines = masked_arguments(of_first_start(_typed_for(run_dir), run_dir))
    return dict(line.removeprefix("++").partition("=")[::2] for line in lines)


def _typed_for(run_dir: Path) -> list[str]:
    path = run_dir / OVERRIDES
    if not path.is_file():
        return []
    try:
        check_yaml(path)
        held = OmegaConf.to_container(OmegaConf.load(path))
    except Exception:  # YAML's errors have no common type; a table of runs does without
        held = []
    return [str(line) for line in held] if isinstance(held, list) else []


def of_first_start(lines: Sequence[str], run_dir: Path) -> list[str]:
    """Return overrides without those that only resume the run in its own folder."""

    def resumes(line: str) -> bool:
        key, _, value = line.lstrip("+").partition("=")
        path = value.strip("'\"")
        is_left = path == "null" or is_own(path, run_dir)
        return key == "resume" or (key == "ckpt_path" and is_left)

    return [line for line in lines if not resumes(line)]


def is_own(ckpt_path: str, run_dir: str | Path) -> bool:
    """Return whether a `ckpt_path` of fit is a checkpoint of the run in this folder."""
    path = Path(os.path.abspath(ckpt_path))
    is_here = "://" not in ckpt_path and path.is_relative_to(os.path.abspath(run_dir))
    return ckpt_path in ("last", "best", "auto") or is_here


def joined(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return the overrides of a run and of its resume:
    a key of the later ones replaces it and what is below it.
    """
    keys = tuple(_key(line) for line in now)
    return [
        line for line in before if not f"{_key(line)}.".startswith(tuple(f"{key}." for key in keys))
    ] + [*now]


def _key(line: str) -> str:
    return line.lstrip("+~").partition("=")[0]


def read_config(path: Path) -> dict[str, Any]:
    """Return a config's file, not resolved.

    Raises:
        ConfigError: it cannot be read.
    """
    check_yaml(path)
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(
            f"{unreadable(path, error)} Correct the file, or name another config."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} is no config: it holds a {type(content).__name__}. Give conf=NAME and another"
            " run_dir."
        )
    return {str(key): value for key, value in with_current_names(content).items()}
