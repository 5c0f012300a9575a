"""Hydra's own node of a config, `hydra`: it decides what Hydra itself builds and runs, so only the command line may set it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from trainkit.errors import ConfigError


def compose(folder: Path, name: str | None, overrides: list[str]) -> DictConfig:
    """Return a composed config with Hydra's own node; `name` None for an empty one."""
    GlobalHydra.instance().clear()
    hydra.initialize_config_dir(str(folder), version_base="1.3")
    config = hydra.compose(name, overrides, return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    return config


def check_hydra(config: DictConfig, folder: Path, typed: list[str]) -> None:
    """Refuse a config file that changes the objects that Hydra itself builds and runs.

    Hydra builds its launcher, sweeper, callbacks and logging from the config, of any class, before any check. They must be
    those of an empty config, except for overrides on the command line.
    """
    plain = _hydra_parts(compose(folder, None, typed))
    found = _hydra_parts(config)
    HydraConfig.instance().set_config(config)
    for key, value in found.items():
        if value != plain[key]:
            raise ConfigError(f"A config file sets hydra.{key}, which decides what Hydra runs. Give it at the command line.")


def _hydra_parts(config: DictConfig) -> dict[str, Any]:
    """Return the parts of Hydra's own config that can run code or change the process, resolved."""
    HydraConfig.instance().set_config(config)
    node = config.hydra
    parts = {key: node[key] for key in ("callbacks", "launcher", "sweeper", "job_logging", "hydra_logging")}
    parts |= {f"job.{key}": node.job[key] for key in ("env_set", "env_copy", "chdir")}
    return {
        key: OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else part for key, part in parts.items()
    }
