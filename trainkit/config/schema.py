"""Checks a composed config against the constructors that it names,
before torch is loaded and anything is written.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from trainkit.api.lightning_names import TRAINER_ARGUMENTS
from trainkit.arguments import illegal, problem, unknown
from trainkit.config.allowlist import check_name
from trainkit.config.launchers import (
    check_launcher,
    engine_started_by,
    runs_elsewhere,
    starts_ranks,
)
from trainkit.config.of_run import is_own
from trainkit.config.roles import declared_engine
from trainkit.config.signature import Parameter, Signature, read_signature
from trainkit.engine.select import require, target_of
from trainkit.errors import ConfigError
from trainkit.extension import advice
from trainkit.launch.environment import read_launcher

# The keys at a config's top, with the annotation of the plain ones.
PLAIN_KEYS = {
    "conf": "str",
    "run_dir": "FolderPath",
    "seed": "Seed",
    "ckpt_path": "str | None",
    "resume": "Literal['auto'] | None",
    "init_weights": "str | None",
    "strict": "bool",
    "table": "Literal['csv', 'parquet'] | None",
    "optimized_metric": "str | None",
    "trust": "list[str]",
    "vars": "dict | None",
}
# parts first: an error names the part's own key
ONE_OBJECT = ("launcher", "engine", "communication", "data", "optimizer", "lr", "task")
SEVERAL_OBJECTS = ("callbacks", "logger")
KEYS = (*PLAIN_KEYS, *ONE_OBJECT, *SEVERAL_OBJECTS, "trainer")
# Arguments of the Trainer that have their own place in a config.
ELSEWHERE = {
    "callbacks": "callbacks are a group of their own: callbacks=...",
    "engine": "the engine is a group of its own: engine=auto|single|horovod|ddp|fsdp|deepspeed.",
    "communication": (
        "communication is a group of its own: communication=exact|powersgd|local_sgd|diloco."
    ),
    "logger": "loggers are a group of their own: logger=...",
    "run_dir": "run_dir is a key at the top: run_dir=...",
    "seed": "seed is a key at the top: seed=...",
}
_NO_SETTING = {
    "experiment": (
        "An experiment's file sets keys at the top; its first line must be: # @package _global_"
    ),
    "hydra": "hydra's own settings are given at the command line.",
}
# What users type -> the key, for the usual names of settings of any config.
_USUAL = {
    "batch_size": "data.batch_size",
    "config": "conf",
    "config_name": "conf",
    "epochs": "trainer.max_epochs",
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "num_workers": "data.num_workers",
    "steps": "trainer.max_steps",
}
_SPECIAL = ("_target_", "_partial_")
# The Trainer's arguments about samples: settings of any data, so `data.` takes them too, before its
# own constructor's.
SAMPLE_KEYS = ("on_bad_sample", "on_bad_sample_limit")
# What trainkit gives an optimizer and a schedule that a config leaves `_partial_`.
_OF_THE_CALLER = ("params", "optimizer", "total_steps")
_ACCELERATOR = Parameter(
    "Literal['auto', 'cpu', 'gpu', 'cuda', 'xpu', 'mps'] | None", required=False
)


def check(
    config: dict[str, Any],
    command: str,
    unused: Sequence[str],
    named: Collection[str] | None = None,
) -> None:
    """Check a whole config.

    Args:
        unused: groups that nothing refers to.
        named: if the config is that of a run, the modules of the user's own that it may name; see
            check_name.

    Raises:
        ConfigError: the first mistake found, by its key.
    """
    for key, value in config.items():
        if key not in KEYS:
            if full := full_key(key):
                raise ConfigError(f"{key} is not a setting of its own. Write {full}=...")
            raise ConfigError(unknown(key, key, list(KEYS), _NO_SETTING))
        legal = problem(PLAIN_KEYS[key], value) if key in PLAIN_KEYS else None
        if legal is not None:
            raise ConfigError(illegal(key, value, legal))
    allow = functools.partial(check_name, trusted=config.get("trust") or [], named=named)
    for key in ONE_OBJECT:
        if config.get(key) is not None:
            own = config[key]
            if key == "data" and isinstance(own, dict):
                own = {name: value for name, value in own.items() if name not in SAMPLE_KEYS}
            launched = (
                engine_started_by(config) if key == "engine" and starts_ranks(config) else None
            )
            _check_node(own, key, allow, launched)
    for key in SEVERAL_OBJECTS:
        several = config.get(key) or {}
        if not isinstance(several, dict):
            raise ConfigError(
                illegal(key, several, "a mapping, of a name for each to its _target_ and arguments")
            )
        for name, node in several.items():
            _check_node(node, f"{key}.{name}", allow)
    samples_of(config)
    _check_trainer(config.get("trainer"), command)
    with_accelerator(config)
    if not isinstance(config.get("task"), dict):
        raise ConfigError(
            "There is no task: put `task: {_target_: my_task.MyTask}` in the config, or choose one:"
            " task=NAME."
        )
    for key in unused:
        raise ConfigError(
            f"{key} is set, but nothing uses it: task has no `{key}: ${{{key}}}`. Pass it to the"
            f" task, or leave it out: ~{key}"
        )
    _check_beginning(config, command)
    check_launcher(config, command)
    # elsewhere the engine's framework is looked for where the ranks run
    if not starts_ranks(config):
        engine = declared_engine(config)
        require(read_launcher().engine if engine == "auto" else engine)
    if not runs_elsewhere(config):
        _check_run_dir(str(config["run_dir"]))


def check_names_beside(missing: str, config: dict[str, Any]) -> None:
    """Check the names of the arguments of the object that lacks one: it may be there, mistyped.

    Args:
        missing: the full key of a required value, as "data.root".
        config: without its interpolations resolved.

    Raises:
        ConfigError: an argument is unknown.
    """
    key = missing.partition(".")[0]
    node = config.get(key)
    if key in ONE_OBJECT and isinstance(node, dict) and isinstance(node.get("_target_"), str):
        _check_names(node, key, read_signature(node["_target_"], f"{key}._target_"), {})


def full_key(name: str) -> str | None:
    """Return the whole key of a setting by its last name: "trainer.max_epochs" for "max_epochs".

    Those of the top, of the Trainer, and the usual ones of data and optimizers are known.
    """
    if name in _USUAL or name in KEYS:
        return _USUAL.get(name, name)
    is_trainers = name in read_signature("trainkit.trainer.Trainer", "trainer").parameters
    return f"trainer.{name}" if is_trainers else None


def samples_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the Trainer's arguments that are given as `data.on_bad_sample` and
    `data.on_bad_sample_limit`.

    Raises:
        ConfigError: one is not legal, or the Trainer's own differs.
    """
    data = config.get("data")
    given = {key: data[key] for key in SAMPLE_KEYS if isinstance(data, dict) and key in data}
    parameters = read_signature("trainkit.trainer.Trainer", "trainer").parameters
    for key, value in given.items():
        if (legal := problem(parameters[key].annotation, value)) is not None:
            raise ConfigError(illegal(f"data.{key}", value, legal))
        own = (config.get("trainer") or {}).get(key, value)
        if own != value:
            raise ConfigError(
                f"data.{key} is {value}, and trainer.{key} is {own}: they are one setting. Leave"
                " one out."
            )
    return given


def with_accelerator(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with Lightning's `trainer.accelerator` as `engine.device`.

    Raises:
        ConfigError: they differ.
    """
    trainer, engine = dict(config["trainer"]), config.get("engine") or {}
    given = trainer.pop("accelerator", None)
    wanted = {"gpu": "cuda"}.get(given, given)
    device = engine.get("device", "auto")
    if wanted in (None, "auto"):
        return config | {"trainer": trainer}
    if not engine or device not in ("auto", wanted):
        raise ConfigError(
            f"trainer.accelerator is '{given}', and engine.device is"
            f" {device if engine else 'unset'}: they are one setting. Leave trainer.accelerator"
            f" out, and set engine.device={wanted}."
        )
    return config | {"trainer": trainer, "engine": engine | {"device": wanted}}


def _check_trainer(node: Any, command: str) -> None:
    if not isinstance(node, dict):
        raise ConfigError("trainer is missing; it must be a mapping of the Trainer's arguments.")
    signature = read_signature("trainkit.trainer.Trainer", "trainer")
    own = {name: p for name, p in signature.parameters.items() if name not in ELSEWHERE}
    own["accelerator"] = _ACCELERATOR  # Lightning's; a script's Trainer takes it too
    _check_arguments(node, "trainer", Signature(own), TRAINER_ARGUMENTS | ELSEWHERE)
    ends = (
        *(node.get(name) for name in ("max_epochs", "max_steps", "max_time")),
        node.get("fast_dev_run") or None,
    )
    if command == "fit" and all(end is None for end in ends):
        raise ConfigError(
            "None of trainer.max_epochs, trainer.max_steps and trainer.max_time is set: training"
            " would never end. Set one of them, or trainer.max_epochs=-1 to train until a stop is"
            " requested."
        )


def _check_node(
    node: Any, key: str, allow: Callable[[str, str], None], launched: str | None = None
) -> None:
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        hint = " If a config has none, its task makes it." if key in ("optimizer", "lr") else ""
        named = node if isinstance(node, dict) else {}
        texts = [advice("an object of a config", str(name)).removeprefix(".") for name in named]
        hint = next(filter(None, texts), hint)
        raise ConfigError(
            f"{key} has no _target_; it must name the class to build, as `_target_:"
            f" my_task.MyTask`.{hint}"
        )
    target = node["_target_"]
    allow(target, f"{key}._target_")
    checked, explained = target_of(target, launched) if key == "engine" else (target, {})
    _check_arguments(node, key, read_signature(checked, f"{key}._target_"), explained)
    _check_inside(node, key, allow)


def _check_inside(value: Any, key: str, allow: Callable[[str, str], None]) -> None:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, item in items:
        if isinstance(item, dict) and "_target_" in item:
            _check_node(item, f"{key}.{name}", allow)
        else:
            _check_inside(item, f"{key}.{name}", allow)


def _check_names(
    node: dict[str, Any], key: str, signature: Signature, explained: dict[str, str]
) -> None:
    given = _OF_THE_CALLER if node.get("_partial_") else ()
    known = [name for name in signature.parameters if name not in given]
    for name in node:
        if name not in known and name not in _SPECIAL and not signature.accepts_any:
            raise ConfigError(unknown(f"{key}.{name}", str(name), known, explained))


def _check_arguments(
    node: dict[str, Any], key: str, signature: Signature, explained: dict[str, str]
) -> None:
    _check_names(node, key, signature, explained)
    given = _OF_THE_CALLER if node.get("_partial_") else ()
    for name, value in node.items():
        parameter = signature.parameters.get(name)
        if parameter is None or name in given or name in _SPECIAL:
            continue
        built = isinstance(value, dict) and "_target_" in value
        legal = None if built or not parameter.annotation else problem(parameter.annotation, value)
        if legal is not None:
            raise ConfigError(illegal(f"{key}.{name}", value, legal))
    if node.get("_partial_"):
        return  # its caller gives the rest
    for name, parameter in signature.parameters.items():
        if parameter.required and name not in node and name not in ("args", "kwargs"):
            raise ConfigError(f"{key}.{name} is missing; {node.get('_target_', key)} needs it.")


def _check_beginning(config: dict[str, Any], command: str) -> None:
    ckpt_path, weights = config.get("ckpt_path"), config.get("init_weights")
    for key in ("resume", "init_weights"):
        if config.get(key) is not None and command in ("validate", "test", "predict"):
            raise ConfigError(
                f"{key} is for fit; {command} takes the weights of ckpt_path=last|best|PATH."
            )
    if config.get("table") is not None and command != "predict":
        raise ConfigError(
            f"table is '{config['table']}', the format of the table that predict writes; {command}"
            " writes none."
        )
    if config.get("resume") is not None and ckpt_path and is_own(ckpt_path, config["run_dir"]):
        raise ConfigError(
            f"resume is 'auto' and ckpt_path is '{ckpt_path}': two checkpoints of this run. Leave"
            " one out (null); beside resume=auto, ckpt_path=PATH names another run's checkpoint, from"
            " which this one begins while it has none."
        )
    if ckpt_path is not None and weights is not None:
        raise ConfigError(
            f"ckpt_path is '{ckpt_path}' and init_weights is '{weights}': two starting points."
            " Leave one out (null)."
        )
    here = (
        weights is None or "://" in weights or not read_launcher().is_main or Path(weights).exists()
    )
    if not here:  # only rank 0 reads it
        raise ConfigError(
            f"init_weights is '{weights}', and there is no such file or folder. Give a checkpoint's"
            " folder, a .safetensors file, a folder of transformers, a state dict (.pt, .pth), or"
            " a Lightning checkpoint (.ckpt)."
        )
    if config.get("strict") is False and weights is None:
        raise ConfigError(
            "strict is false, but it applies to init_weights=... only, and there are none."
        )


def _check_run_dir(run_dir: str) -> None:
    folder = Path(run_dir).absolute()
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
    except OSError as error:
        raise ConfigError(
            f"run_dir is '{run_dir}', which cannot be written: {error.strerror}. Give another."
        ) from None
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"run_dir is '{run_dir}', but {folder} is no writable folder. Give another: run_dir=..."
        )
