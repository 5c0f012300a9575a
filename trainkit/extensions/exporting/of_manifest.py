"""The config in a checkpoint's manifest, from which a Task is built again."""

from __future__ import annotations

from typing import Any

from trainkit.config.recorded import ENV, resolved, texts_of
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
    return {str(key): value for key, value in with_current_names(resolved(config)).items()}
