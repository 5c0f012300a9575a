"""What may be asked of an export, checked before torch is loaded and anything is built."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from trainkit.errors import ConfigError, did_you_mean

# format -> (its files' suffix, the packages that it needs)
FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "safetensors": (".safetensors", ()),
    "torch_export": (".pt2", ()),
    "onnx": (".onnx", ("onnx", "onnxscript", "onnxruntime")),
}


def check_format(name: str) -> None:
    """Refuse a format that is unknown, or whose packages are not there.

    Raises:
        ConfigError: it is.
    """
    if name not in FORMATS:
        raise ConfigError(f"format is '{name}'; it must be one of {', '.join(FORMATS)}.{did_you_mean(name, FORMATS)}")
    absent = [package for package in FORMATS[name][1] if importlib.util.find_spec(package) is None]
    if absent:
        raise ConfigError(
            f"format={name} needs {', '.join(absent)}, which {'is' if len(absent) == 1 else 'are'} not installed. Install: "
            "pip install 'trainkit[export]'"
        )


def check_output(output: str | Path, name: str) -> Path:
    """Return the file to write, after checking that it can be written.

    Args:
        output: the file.
        name: the format.

    Raises:
        ConfigError: its suffix is another format's, its folder is not there, or it is a folder itself.
    """
    path, suffix = Path(output), FORMATS[name][0]
    if path.is_dir():
        raise ConfigError(f"output is '{output}', which is a folder; it must be a file, as {path / f'model{suffix}'}.")
    if path.suffix != suffix:
        raise ConfigError(f"output is '{output}'; for format={name} its name must end in {suffix}.")
    if not path.parent.is_dir():
        raise ConfigError(f"output is '{output}', and there is no folder {path.parent}. Make it, or give another file.")
    return path
