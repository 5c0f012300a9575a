"""Checks of an export request, made before torch is imported and anything is built."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from trainkit.errors import ConfigError, did_you_mean

# format -> (its files' suffix, "" for a folder; the packages that it needs)
FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "safetensors": (".safetensors", ()),
    "huggingface": ("", ()),
    "peft": ("", ("peft",)),
    "torch_export": (".pt2", ()),
    "onnx": (".onnx", ("onnx", "onnxscript", "onnxruntime")),
}

_EXTRAS = {"peft": "peft"}  # of the formats whose extra is not `export`
_OF_FOLDERS = ("config.json", "adapter_config.json")


def check_format(name: str) -> None:
    """Reject a format that is unknown, or whose packages are not installed.

    Raises:
        ConfigError: the format is rejected.
    """
    if name not in FORMATS:
        raise ConfigError(
            f"format is '{name}'; it must be one of"
            f" {', '.join(FORMATS)}.{did_you_mean(name, FORMATS)}"
        )
    absent = [package for package in FORMATS[name][1] if importlib.util.find_spec(package) is None]
    if absent:
        raise ConfigError(
            f"format={name} needs {', '.join(absent)}, which {'is' if len(absent) == 1 else 'are'}"
            f" not installed. Install: pip install 'trainkit[{_EXTRAS.get(name, 'export')}]'"
        )


def check_output(output: str | Path, name: str) -> Path:
    """Check that an output of the format `name` can be written, and return its path.

    Raises:
        ConfigError: it has another format's suffix, its folder does not exist, or it is a folder in
            place of a file; or, of a format that is a folder, there is something else that would be
            replaced.
    """
    path = Path(output)
    suffix = FORMATS[name][0]
    if not suffix and path.exists() and not _may_be_replaced(path):
        raise ConfigError(
            f"output is '{output}', which holds something other than a model of transformers or peft;"
            f" format={name} writes a folder, and replaces only an earlier one. Give a new folder."
        )
    if suffix and path.is_dir():
        raise ConfigError(
            f"output is '{output}', which is a folder; it must be a file, for example"
            f" {path / f'model{suffix}'}."
        )
    if suffix and path.suffix != suffix:
        raise ConfigError(f"output is '{output}'; for format={name} its name must end in {suffix}.")
    if not path.parent.is_dir():
        raise ConfigError(
            f"output is '{output}', and the folder {path.parent} does not exist. Create it, or give"
            " another place."
        )
    return path


def _may_be_replaced(path: Path) -> bool:
    """Return whether a path is an empty folder, or one of transformers or peft."""
    written = any((path / name).is_file() for name in _OF_FOLDERS)
    return path.is_dir() and (written or not any(path.iterdir()))
