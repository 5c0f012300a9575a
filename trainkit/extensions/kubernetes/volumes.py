"""Volumes of the pods: claims, or any other kind that Kubernetes has,
and where they are mounted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.arguments import show
from trainkit.errors import ConfigError

_OF_THE_MOUNT = ("mountPath", "subPath", "readOnly")
_ENDS_WITH_ITS_POD = (
    "emptyDir",
    "ephemeral",
    "configMap",
    "secret",
    "downwardAPI",
    "projected",
    "image",
)
_EXAMPLE = "/runs, or {mountPath: /data, readOnly: true, nfs: {server: filer, path: /data}}"


@dataclass(frozen=True)
class Volume:
    """A volume of all pods.

    Attributes:
        name: in the pods' spec.
        source: the kind of volume, and its fields: {"nfs": {"server": ..., "path": ...}}.
        mount: where, and how, the container mounts it; mountPath is absolute.
    """

    name: str
    source: Mapping[str, Any]
    mount: Mapping[str, Any]

    @property
    def path(self) -> str:
        """Where it is mounted."""
        return str(self.mount["mountPath"])

    @property
    def holds_runs(self) -> bool:
        """Whether what pods write there outlives them."""
        return not self.mount.get("readOnly") and not any(
            kind in self.source for kind in _ENDS_WITH_ITS_POD
        )


def volume_of(name: str, given: Any) -> Volume:
    """Read one entry of launcher.volumes: a path, where the claim of this name is mounted, or a
    mapping.

    Raises:
        ConfigError: it is neither, the path is not absolute, or there are several kinds of volume.
    """
    fields = {"mountPath": given} if isinstance(given, str) else given
    key = f"launcher.volumes.{name}"
    if not isinstance(fields, Mapping):
        raise ConfigError(
            f"{key} is {show(given)}; it must be an absolute path in the pods, as {_EXAMPLE}."
        )
    path = fields.get("mountPath")
    if not isinstance(path, str) or not path.startswith("/") or path.rstrip("/") == "":
        place = key if isinstance(given, str) else f"{key}.mountPath"
        raise ConfigError(
            f"{place} is {show(path)}; it must be an absolute path in the pods, as {_EXAMPLE}."
        )
    mount = {field: fields[field] for field in _OF_THE_MOUNT if field in fields} | {
        "mountPath": path.rstrip("/")
    }
    source = {field: value for field, value in fields.items() if field not in _OF_THE_MOUNT}
    if len(source) > 1:
        raise ConfigError(
            f"{key} has {' and '.join(source)}; a volume is of one kind, beside"
            f" {', '.join(_OF_THE_MOUNT)}: {_EXAMPLE}."
        )
    return Volume(name, source or {"persistentVolumeClaim": {"claimName": name}}, mount)
