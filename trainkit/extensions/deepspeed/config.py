"""Writes DeepSpeed's config from trainkit's settings, and checks the user's own against them.
Imports no DeepSpeed.

A value that both name must be the same in both: trainkit does not guess which one is meant. "auto"
takes trainkit's value, or DeepSpeed's default if trainkit has none. All other keys of the user's
config reach DeepSpeed as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from trainkit.arguments import show
from trainkit.engine.step_settings import StepSettings
from trainkit.errors import ConfigError
from trainkit.extensions.deepspeed.sections import check_optimizer, check_scheduler

Place = Literal["none", "cpu", "nvme"]
_DEFAULT_STAGE = 2

# Sections in which DeepSpeed would do what trainkit does already; and those that only calls read
# which trainkit never makes: checkpointing.configure, save_checkpoint, compile, its loader.
_REFUSED = {
    "amp": "apex is not supported; trainer.precision=bf16-mixed is",
    "torch_autocast": "trainer.precision has a value of its own for it",
    "elasticity": "the number of ranks is the launcher's",
    "autotuning": "it restarts the run with other settings",
    "curriculum_learning": "trainkit feeds the data",
    "data_efficiency": "trainkit feeds the data",
    "tensor_parallel": "all ranks have different samples in trainkit",
    "pipeline": "trainkit has the loop",
    "activation_checkpointing": "it has no effect here; trainer.activation_checkpointing=true has,"
    " on every engine",
    "checkpoint": "it has no effect here; checkpoints are trainkit's own, of whole weights",
    "datastates_ckpt": "it has no effect here; checkpoints are trainkit's own",
    "dataloader_drop_last": "it has no effect here; trainkit feeds the data",
    "compile": "it has no effect here; under DeepSpeed nothing is compiled",
}


@dataclass(frozen=True)
class DeepSpeedOptions:
    """The options of the engine that have a place in DeepSpeed's config;
    None takes the user's config's, or the default.
    """

    stage: int | None = None
    offload_optimizer: Place | None = None
    offload_param: Place | None = None
    nvme_path: str | None = None

    def resolved(self, user: Mapping[str, Any]) -> DeepSpeedOptions:
        """Return them without None: what is not set is the user's config's, or else stage 2 and no
        offload.

        Raises:
            ConfigError: they exclude each other.
        """
        zero = _section(user, "zero_optimization")
        stage = self.stage if self.stage is not None else _given(zero, "stage", _DEFAULT_STAGE)
        if stage not in (1, 2, 3):
            raise ConfigError(
                f"engine.config's zero_optimization.stage is {show(stage)}; it must be 1, 2 or 3."
                " Or use engine=ddp."
            )
        places = {}
        for name in ("offload_optimizer", "offload_param"):
            section = _section(zero, name, "zero_optimization.")
            places[name] = getattr(self, name) or _given(section, "device", "none")
            if places[name] not in ("none", "cpu", "nvme"):
                raise ConfigError(
                    f"engine.config's zero_optimization.{name}.device is {show(places[name])}; it"
                    " must be none, cpu or nvme."
                )
        paths = {
            _given(_section(zero, name), "nvme_path", None)
            for name, place in places.items()
            if place == "nvme"
        }
        path = self.nvme_path or next((path for path in paths if path), None)
        resolved = DeepSpeedOptions(
            stage, places["offload_optimizer"], places["offload_param"], path
        )
        resolved._check()
        return resolved

    def _check(self) -> None:
        if self.offload_param != "none" and self.stage != 3:
            raise ConfigError(
                f"engine.offload_param is {show(self.offload_param)}, but engine.stage is"
                f" {self.stage}: only stage 3 splits weights. Set engine.stage=3, or"
                " engine.offload_param=none."
            )
        on_disk = [
            name for name in ("offload_optimizer", "offload_param") if getattr(self, name) == "nvme"
        ]
        if on_disk and self.stage != 3:
            raise ConfigError(
                f"engine.{on_disk[0]} is 'nvme', but engine.stage is {self.stage}: DeepSpeed moves"
                f" to disk in stage 3 only. Set engine.stage=3, or engine.{on_disk[0]}=cpu."
            )
        if on_disk and not self.nvme_path:
            raise ConfigError(
                f"engine.{on_disk[0]} is 'nvme'; give the folder of the disk as engine.nvme_path."
            )
        if self.nvme_path and not on_disk:
            raise ConfigError(
                f"engine.nvme_path is '{self.nvme_path}', but nothing is moved there. Set"
                " engine.offload_optimizer=nvme."
            )


def read_config(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the user's config, from a file of JSON or as given.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return json.loads(json.dumps(given))  # type: ignore[no-any-return] # plain, and a copy
    try:
        config = json.loads(Path(given).read_text())
    except OSError as error:
        raise ConfigError(
            f"engine.config is '{given}', which cannot be read: {error.strerror}. Give a file of"
            " JSON."
        ) from None
    except ValueError as error:
        raise ConfigError(f"engine.config is '{given}', which is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"engine.config is '{given}', which holds a {type(config).__name__}; it must hold a"
            " mapping."
        )
    return config


def write_config(
    settings: StepSettings,
    options: DeepSpeedOptions,
    user: Mapping[str, Any],
    world_size: int,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Return the config for DeepSpeed.

    Args:
        settings: of the fit.
        options: of the engine, resolved.
        user: the user's own config.
        world_size: number of ranks.
        optimizer: the Task's.

    Raises:
        ConfigError: the user's config and trainkit name different values, or it has a section that
            trainkit refuses.
    """
    for name in sorted(user.keys() & _REFUSED.keys()):
        if not _is_off(user[name]):
            raise ConfigError(
                f"engine.config has '{name}', which trainkit does not pass on: {_REFUSED[name]}."
                " Leave it out."
            )
    check_optimizer(user.get("optimizer"), optimizer)
    check_scheduler(user.get("scheduler"))
    rest = {
        name: value
        for name, value in user.items()
        if name not in {*_REFUSED, "optimizer", "scheduler"}
    }
    written = _without_auto(rest)
    for place, (value, source) in _ours(settings, options, user, world_size).items():
        _put(written, place, value, source, user)
    return written


def _is_off(section: Any) -> bool:
    """Return whether a section asks for nothing."""
    if not isinstance(section, Mapping):
        return not section or section == "auto"
    return section.get("enabled") is False or all(map(_is_off, section.values()))


def _ours(
    settings: StepSettings, options: DeepSpeedOptions, user: Mapping[str, Any], world_size: int
) -> dict[str, tuple[Any, str]]:
    """Return each value of trainkit by its place in DeepSpeed's config,
    with its key in trainkit.
    """
    micro = settings.batch_size
    steps = settings.accumulate
    if micro is None:  # DeepSpeed needs a number, and only prints with it
        micro = _given(user, "train_micro_batch_size_per_gpu", 1)
    precision = "trainer.precision (its weights stay float32)"
    values = {
        "train_micro_batch_size_per_gpu": (micro, "the batch size of the data (data.batch_size)"),
        "gradient_accumulation_steps": (steps, "trainer.accumulate_grad_batches"),
        "train_batch_size": (
            micro * steps * world_size,
            f"the batch of a step on {world_size} ranks",
        ),
        "gradient_clipping": (settings.clip_val or 0.0, "trainer.gradient_clip_val"),
        "fp16.enabled": (False, precision),
        "bf16.enabled": (False, precision),
        "gradient_allreduce_op": ("mean", "the engine, which turns the mean into the sum"),
        "managed_gradient_accumulation": (True, "the engine, which sets the end of a step"),
        "zero_force_ds_cpu_optimizer": (False, "the Task, which makes the optimizer"),
        "zero_optimization.stage": (options.stage, "engine.stage"),
    }
    for name in ("offload_optimizer", "offload_param"):
        place = getattr(options, name)
        key = f"zero_optimization.{name}"
        if place != "none" or name in _section(user, "zero_optimization"):
            values[f"{key}.device"] = (place, f"engine.{name}")
        if place == "nvme":
            values[f"{key}.nvme_path"] = (options.nvme_path, "engine.nvme_path")
    return values


def _put(
    written: dict[str, Any], place: str, value: Any, source: str, user: Mapping[str, Any]
) -> None:
    """Write a value of trainkit.

    Raises:
        ConfigError: the user's config has another one there.
    """
    *path, key = place.split(".")
    node = written
    theirs = user
    for depth, name in enumerate(path):
        theirs = _section(theirs, name, "".join(f"{outer}." for outer in path[:depth]))
        node = node.setdefault(name, {})
    given = theirs.get(key)
    if given is not None and given != "auto" and given != value:
        remedy = _REMEDIES.get(place, f"Make them equal, or set {key} to 'auto' in engine.config.")
        raise ConfigError(
            f"engine.config's {place} is {show(given)}, but {source} is {show(value)}: two sources"
            f" of one value. {remedy}"
        )
    node[key] = value


# Where trainkit's value cannot be another one.
_REMEDIES = dict.fromkeys(
    ("bf16.enabled", "fp16.enabled"),
    "Set enabled to 'auto' in engine.config; trainer.precision=bf16-mixed computes in bfloat16.",
)


def _section(node: Mapping[str, Any], name: str, above: str = "") -> Mapping[str, Any]:
    section = node.get(name)
    if section is None or section == "auto":
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"engine.config's {above}{name} is {show(section)}; it must be a mapping."
        )
    return section


def _given(section: Mapping[str, Any], name: str, default: Any) -> Any:
    value = section.get(name)
    return default if value is None or value == "auto" else value


def _without_auto(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without "auto" and null, for which DeepSpeed's own defaults stand."""
    return {
        name: _without_auto(value) if isinstance(value, Mapping) else value
        for name, value in node.items()
        if value is not None and value != "auto"
    }
