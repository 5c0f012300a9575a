"""The config as it leaves the process:
resolved, but values of the environment stay interpolations, and secrets are masked.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from trainkit.errors import ConfigError
from trainkit.safety.masking import MASK, is_secret, masked

_MARK = "trainkit_env_"
ENV = re.compile(r"\$\{oc\.env:\s*([\w.]+)")


@dataclass(frozen=True)
class RecordedConfig:
    """What files, manifests and loggers receive.

    Attributes:
        config: of plain values.
        values: those that it leaves out; they are masked in other texts.
    """

    config: dict[str, Any]
    values: tuple[str, ...] = ()


def keep(config: DictConfig, resolved: Mapping[str, Any]) -> RecordedConfig:
    """Return what may leave the process.

    Args:
        config: not resolved.
        resolved: the same with all interpolations replaced, and perhaps further keys.
    """
    raw, values = OmegaConf.to_container(config, resolve=False), list(_secrets_in(resolved))
    with _marked():
        recorded = _with_text(raw, resolved, OmegaConf.create(raw), values)
    if "run_dir" in resolved:
        recorded["run_dir"] = resolved["run_dir"]  # this job's own folder
    return RecordedConfig(masked(recorded), tuple(dict.fromkeys(values)))


def refuse_masks(tree: Any, key: str = "") -> None:
    """Refuse a config that holds a masked value: it is of a run's file.

    Raises:
        ConfigError: names the key.
    """
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            refuse_masks(value, f"{key}.{name}".lstrip("."))
    elif tree == MASK and is_secret(key):
        raise ConfigError(
            f"{key} is masked in the run's config.yaml, since it looks like a secret. Give it"
            f" again: {key}=... To let later commands find it, put it into the environment:"
            f" {key}='${{oc.env:NAME}}'."
        )


def resolved(config: dict[str, Any]) -> Any:
    """Return the config of a file with the environment's values in it.

    Raises:
        ConfigError: one is not set.
    """
    try:
        return OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"The config of the file cannot be resolved: {str(error).splitlines()[0]}."
        ) from error


@contextlib.contextmanager
def without_environment() -> Iterator[None]:
    """Within the context `${oc.env:NAME}` is resolved to its own text."""
    with _registered(lambda name, *default: f"\\${{oc.env:{name}}}"):
        yield


def _marked() -> contextlib.AbstractContextManager[None]:
    return _registered(lambda name, *default: f"{_MARK}{name}")


@contextlib.contextmanager
def _registered(resolver: Any) -> Iterator[None]:
    OmegaConf.register_new_resolver("oc.env", resolver, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _with_text(raw: Any, resolved: Any, marked: Any, values: list[str]) -> Any:
    """Return `resolved` with the text of `raw` for each value that came from the environment;
    append these to `values`.
    """
    if isinstance(raw, dict) and isinstance(resolved, Mapping):
        return {
            key: _child(raw, value, marked, key, values) if key in raw else value
            for key, value in resolved.items()
        }
    if isinstance(raw, list) and isinstance(resolved, list):
        return [_child(raw, value, marked, i, values) for i, value in enumerate(resolved)]
    return resolved


def _child(raw: Any, resolved: Any, marked: Any, key: Any, values: list[str]) -> Any:
    own = raw[key]
    if not isinstance(own, str):
        return (
            _with_text(own, resolved, marked[key], values)
            if isinstance(own, (dict, list))
            else resolved
        )
    if "${" not in own:
        return resolved
    try:
        value = marked[key]
        is_plain = _MARK not in str(
            OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        )
    except Exception:  # a resolver of the user's own may refuse the mark
        is_plain = "oc.env" not in own
    if is_plain:
        return resolved
    values.extend(text for _, text in texts_of(resolved))
    return own


def _secrets_in(tree: Any) -> Iterator[str]:
    for key, text in texts_of(tree):
        if is_secret(key):
            yield text


def texts_of(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the text of each text in a tree of plain values."""
    if isinstance(tree, str):
        yield key, tree
    items = (
        tree.items()
        if isinstance(tree, Mapping)
        else enumerate(tree)
        if isinstance(tree, Sequence)
        else ()
    )
    for name, value in () if isinstance(tree, str) else items:
        yield from texts_of(value, f"{key}.{name}".lstrip("."))
