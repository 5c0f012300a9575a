"""Rebuilds a fit at the start of a capsule's step: the Task from its config, weights, random
states, loss scale.

The config is input from a file: it passes all checks of a config, and its own `trust` entry is
ignored. No data set and no loader is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.api.lightning_names import of_another_class
from trainkit.api.task import Task
from trainkit.arguments import unknown
from trainkit.checkpoint.format import MANIFEST, TRAINING, load_training, read_manifest
from trainkit.checkpoint.places import local_copy
from trainkit.checkpoint.weights import load_into, read_weights
from trainkit.config import schema
from trainkit.config.instantiate import instantiate
from trainkit.config.users_code import named_by_user
from trainkit.data.seeding import seed_process
from trainkit.errors import CheckpointError, ConfigError
from trainkit.extensions.capsule.folder import Capsule
from trainkit.extensions.capsule.watch import Watch
from trainkit.extensions.exporting.layers import make_layers, replacing_layers
from trainkit.extensions.exporting.of_manifest import from_manifest
from trainkit.optim.optimizer_state import load_state
from trainkit.run.build import StartFrom, build_run
from trainkit.run.data_sources import DataSources
from trainkit.run.run import Run
from trainkit.run.setup import Stage
from trainkit.safety.untrusted import printable
from trainkit.trainer import Trainer

# Of the Trainer's arguments, those that affect a single step.
TAKEN = (
    "precision",
    "channels_last",
    "deterministic",
    "float32_matmul_precision",
    "gradient_clip_val",
    "gradient_clip_algorithm",
)
MORE = ("compile", "benchmark", "detect_anomaly")


def merged(config: Any, overrides: Mapping[str, Any]) -> Any:
    """Return a config with other values merged in, at any depth."""
    if not isinstance(config, dict):
        return dict(overrides)
    result = dict(config)
    for key, value in overrides.items():
        result[key] = (
            merged(result.get(key), value)
            if isinstance(value, dict) and isinstance(result.get(key), dict)
            else value
        )
    return result


def build_task(capsule: Capsule, overrides: Mapping[str, Any], trust: Sequence[str]) -> Task:
    """Build the Task from the capsule's config.

    Raises:
        CheckpointError: the capsule has no config.
        ConfigError: the config is not legal.
    """
    config = capsule.about.get("config")
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{capsule.folder} is from a run in Python code: it has no config to build the Task"
            f" from. Replay it in Python: trainkit.replay('{capsule.folder}',"
            f" task={capsule.about.get('task', 'MyTask').rpartition('.')[2]}(...))."
        )
    parts = {key: value for key, value in overrides.items() if key != "trainer"}
    none = dict.fromkeys(("data", "engine", "ckpt_path", "resume", "init_weights"))
    own = {
        **config,
        **none,
        "trainer": {},
        "callbacks": replacing_layers(config),
        "logger": {},
        "run_dir": ".",
        "strict": True,
        "trust": [*trust],
    }
    own = merged(own, parts)
    own.setdefault("seed", 0)
    own = from_manifest(own, bool(trust))
    schema.check(own, "replay", [], named_by_user([str(overrides)]))
    seed_process(own["seed"])
    task = instantiate(own["task"], "task", own["trust"])
    if not isinstance(task, Task):
        raise ConfigError(of_another_class("task has", task, "Task"))
    if own["callbacks"]:
        make_layers(task, own)
    return task


def trainer_of(capsule: Capsule, changes: Mapping[str, Any], watch: Watch, run_dir: str) -> Trainer:
    """Return a single-process Trainer that computes like the run's.

    Raises:
        ConfigError: `changes` has an argument that does not affect a single step, or an illegal
            value.
    """
    if strange := [name for name in changes if name not in (*TAKEN, *MORE)]:
        raise ConfigError(unknown(f"trainer.{strange[0]}", strange[0], [*TAKEN, *MORE]))
    settings = {name: capsule.about["settings"].get(name) for name in TAKEN}
    recorded = {name: value for name, value in settings.items() if value is not None}
    quiet: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "logger": False,
    }
    steps = int(capsule.about.get("total_steps") or capsule.about["step"] + 1)
    seed = int(capsule.about["settings"].get("seed") or 0)
    own: dict[str, Any] = {
        "engine": "single",
        "max_steps": steps,
        "lr_scaling": "none",
        "callbacks": [watch],
        "run_dir": run_dir,
        "seed": seed,
    }
    return Trainer(**own, **quiet, **{**recorded, **changes})


@contextlib.contextmanager
def opened(trainer: Trainer, task: Task, capsule: Capsule) -> Iterator[Run]:
    """Yield a run at the start of the step, except for weights and random states."""
    about = capsule.about
    # only its size is read: it has one number
    one_batch = [torch.zeros(1, 1).expand(max(1, about["num_samples"] or 1), 1)]
    stage = Stage(
        "fit",
        task,
        DataSources({"train": one_batch}),
        trainer.callbacks,
        trainer.options,
        has_data=True,
    )
    with stage:
        run = build_run(stage, StartFrom())
        state = run.state
        state.global_step, state.current_epoch = int(about["step"]), int(about["epoch"])
        state.loop_steps = state.global_step
        state.step_in_epoch = int(about["step_in_epoch"])
        for hook in ("on_fit_start", "on_train_start", "on_train_epoch_start"):
            run.hooks.of_task(hook)
        _set_modes(task, about)
        if run.precision.scaler.is_enabled() and capsule.step["scaler"]:
            run.precision.scaler.load_state_dict(dict(capsule.step["scaler"]))
        yield run


def _set_modes(task: nn.Module, about: Mapping[str, Any]) -> None:
    modules, parameters = dict(task.named_modules()), dict(task.named_parameters())
    for name, module in modules.items():
        module.training = name not in about.get("in_eval_mode", ())
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in about.get("frozen", ()))


def load_weights(
    run: Run, capsule: Capsule, requested: str | None, trusted: bool = False
) -> tuple[str, int | None]:
    """Load the step's weights, or the nearest available; return their source, and by how many steps
    they are older.

    Raises:
        CheckpointError: there are none, or they do not fit.
    """
    source = _load_weights(run, capsule, requested, trusted)
    if run.task._layers_of is not None:
        run.task._layers_of.check_base(run.task)
    return source


def _load_weights(
    run: Run, capsule: Capsule, requested: str | None, trusted: bool = False
) -> tuple[str, int | None]:
    if requested is None and capsule.weights is not None:
        load_into(run.task, read_weights(str(capsule.weights)), str(capsule.weights))
        _set_groups(run, capsule)
        age = capsule.weights_age
        return f"those of the {'start of training' if age else 'step'}, from the capsule", age
    path = requested or _checkpoint_of(capsule, trusted)
    with local_copy(path) as copy:
        load_into(run.task, read_weights(copy), path)
        older = _steps_older(Path(copy), capsule)
        if (Path(copy) / TRAINING).is_file():
            for optimizer, state in zip(
                run.optimizers, load_training(Path(copy))["optimizers"], strict=False
            ):
                load_state(optimizer, state)
    _set_groups(run, capsule)
    return path, older


def _checkpoint_of(capsule: Capsule, trusted: bool) -> str:
    path = capsule.about.get("checkpoint")
    if not path:
        raise CheckpointError(
            f"{capsule.folder} has no weights (the update was made before the loss was known), and"
            " the run had no checkpoint yet. Pass weights=FOLDER or FILE. With"
            " trainer.stop_on_nonfinite=true, a capsule stores the step's own weights."
        )
    if "://" in str(path):
        if not trusted:
            raise CheckpointError(
                f"{capsule.folder} names a checkpoint at the URL {printable(path)}, which is not"
                " opened without trust. If you know it, pass weights=URL, or trust=[...]."
            )
        return str(path)
    beside = capsule.folder.parent.parent / "checkpoints"  # the run's folder may have been moved
    ages = {}
    for place in (Path(path), *(path.parent for path in sorted(beside.glob(f"[!.]*/{MANIFEST}")))):
        with contextlib.suppress(CheckpointError):  # a damaged checkpoint is skipped
            age = None if place.is_symlink() else _steps_older(place, capsule)
            if age is not None:
                ages[str(place)] = age
    if not ages:
        raise CheckpointError(
            f"{capsule.folder} names the checkpoint {path}, which does not exist any more, and"
            f" {beside} has no other. Pass weights of about step {capsule.about['step']}:"
            " weights=FOLDER or FILE."
        )
    # a later one may contain the bad update
    return min(ages, key=lambda place: (ages[place] < 0, abs(ages[place])))


def _steps_older(folder: Path, capsule: Capsule) -> int | None:
    if not (folder / MANIFEST).is_file():
        return None
    step = read_manifest(folder).get("global_step")
    return int(capsule.about["step"]) - int(step) if isinstance(step, int) else None


def _set_groups(run: Run, capsule: Capsule) -> None:
    """Set rates, momenta and other optimizer settings to those of the step."""
    for optimizer, groups in zip(run.optimizers, capsule.step["groups"], strict=False):
        for group, recorded in zip(optimizer.param_groups, groups, strict=False):
            group.update(recorded)
