"""The config in a checkpoint's manifest, from which a Task is built again."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainkit.config.recorded import ENV, texts_of
from trainkit.errors import ConfigError
from trainkit.extension import with_current_names
from trainkit.safety.masking import is_secret


def from_manifest(config: dict[str, Any], trusted: bool) -> dict[str, Any]:
    """Return the config of a manifest with the environment's values in it.

    Args:
        trusted: whether variables that look like secrets are read too.

    Raises:
        ConfigError: one is not set, or looks like a secret.
    """
    for key, text in texts_of(config):
        if hidden := [name for name in ENV.findall(text) if is_secret(name) and not trusted]:
            raise ConfigError(
                f"{key} is {text}: it reads the secret {hidden[0]}. If you trust the file, add"
                " trust=[...]."
            )
    try:
        content = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"The config of the file cannot be resolved: {str(error).splitlines()[0]}."
        ) from error
    assert isinstance(content, dict)
    return {str(key): value for key, value in with_current_names(content).items()}
