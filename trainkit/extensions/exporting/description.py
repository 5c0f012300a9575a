"""The description beside an exported file, `<name>.predict.json`:
a sample's shape, how a picture becomes one, the classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.errors import ConfigError
from trainkit.extensions.exporting.example import is_batch, rows_of

SUFFIX = ".predict.json"
_VERSION = 1


@dataclass(frozen=True)
class InputTensor:
    """An argument of the forward.

    Attributes:
        shape: of one sample; of the whole argument if it has no row for each sample.
        dtype: as "float32".
        has_rows: whether it has a row for each sample.
    """

    shape: tuple[int, ...]
    dtype: str
    has_rows: bool = True


@dataclass(frozen=True)
class PictureInput:
    """How a picture becomes a sample [3, crop, crop]:
    shorter side to `resize`, centre crop, (x / 255 - mean) / std.
    """

    resize: int
    crop: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Description:
    """What a service needs to know of an exported file.

    Attributes:
        inputs: the arguments of the forward.
        batch_size: samples of a call, if the file takes no other number; else None.
        image: how a picture becomes a sample; None if it does not.
        classes: their names, by place in the output; None if the output is no score of classes.
    """

    inputs: tuple[InputTensor, ...]
    batch_size: int | None = None
    image: PictureInput | None = None
    classes: tuple[str, ...] | None = None


def describe(args: Sequence[Tensor], any_batch_size: bool, about: Mapping[str, Any]) -> Description:
    """Return the description of a file exported with these example arguments.

    Args:
        about: what the data says of its input (DataHooks.describe_input): "image" and "classes", or
            less.

    Raises:
        ConfigError: `about` holds something else.
    """
    rows = tuple(args)
    inputs = tuple(
        InputTensor(
            tuple(arg.shape[1:] if is_batch(arg, rows) else arg.shape),
            str(arg.dtype).removeprefix("torch."),
            is_batch(arg, rows),
        )
        for arg in rows
    )
    try:
        image = PictureInput(**about["image"]) if about.get("image") else None
    except TypeError as error:
        raise ConfigError(
            f"describe_input()['image'] is {about['image']}; it must have resize, crop, mean and"
            f" std ({error})."
        ) from None
    names = about.get("classes")
    return Description(
        inputs,
        None if any_batch_size else rows_of(rows),
        image,
        tuple(map(str, names)) if names else None,
    )


def _tensor(arg: Tensor, has_rows: bool) -> InputTensor:
    return InputTensor(
        tuple(arg.shape[1:] if has_rows else arg.shape),
        str(arg.dtype).removeprefix("torch."),
        has_rows,
    )


def path_of(exported: Path) -> Path:
    """Return the description's file of an exported one."""
    return exported.with_name(exported.stem + SUFFIX)


def write_description(exported: Path, description: Description) -> None:
    """Write the description beside the file."""
    path_of(exported).write_text(
        json.dumps({"version": _VERSION, "file": exported.name, **asdict(description)}, indent=1)
        + "\n"
    )


def read_description(exported: Path) -> Description:
    """Read the description beside an exported file.

    Raises:
        ConfigError: it is missing, or is none.
    """
    path = path_of(exported)
    again = (
        "Export again: python -m trainkit export ckpt_path=best run_dir=RUN format=torch_export."
    )
    if not path.is_file():
        raise ConfigError(
            f"{exported} has no description {path.name} beside it, which says what its input is."
            f" {again}"
        )
    try:
        content = json.loads(path.read_text())
        image = content["image"]
        return Description(
            tuple(
                InputTensor(tuple(i["shape"]), i["dtype"], i["has_rows"]) for i in content["inputs"]
            ),
            content["batch_size"],
            (
                None
                if image is None
                else PictureInput(
                    image["resize"], image["crop"], tuple(image["mean"]), tuple(image["std"])
                )
            ),
            None if content["classes"] is None else tuple(content["classes"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no description of an export ({type(error).__name__}: {error}). {again}"
        ) from error
