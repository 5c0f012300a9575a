"""Names of ModelCheckpoint's folders: {epoch}, {step} and logged values are filled in."""

from __future__ import annotations

import math
import re
from pathlib import Path
from string import Formatter
from typing import Any

from trainkit.api.view import RunView
from trainkit.checkpoint.store import LINKS
from trainkit.errors import ConfigError

FILENAME = "epoch={epoch}-step={step}"


def check_filename(filename: str) -> str:
    """Return the pattern of ModelCheckpoint's names.

    Raises:
        ConfigError: it cannot be filled in, or names no folder of its own.
    """
    try:
        fields = [name for _, name, _, _ in Formatter().parse(filename) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"ModelCheckpoint.filename is '{filename}', which cannot be filled in: {error}."
        ) from error
    if strange := [
        name for name in fields if not name or name[0].isdigit() or "." in name or "[" in name
    ]:
        raise ConfigError(
            f"ModelCheckpoint.filename is '{filename}', and '{{{strange[0]}}}' is no name; there"
            ' are epoch, step, and the names of logged values, with "_" for "/".'
        )
    if (
        "://" in filename
        or Path(filename).is_absolute()
        or ".." in Path(filename).parts
        or not filename.isprintable()
        or filename in LINKS
    ):
        raise ConfigError(
            f"ModelCheckpoint.filename is {filename!r}; it must name a folder of its own, not the"
            " links 'last' and 'best', and without '..', a leading '/', a URL or control"
            " characters. To write elsewhere: dirpath=FOLDER."
        )
    return filename


def filled(
    filename: str, trainer: RunView, early: bool, stale: set[str], inserts_names: bool
) -> str:
    """Return the name of a checkpoint, in which `stale` values are nan;
    if it is `early`, values that are not logged yet are too.
    """
    pattern = re.sub(r"(?<!=)\{(\w[^{}:!]*)", r"\1={\1", filename) if inserts_names else filename
    metrics = trainer.callback_metrics
    values = {k.replace("/", "_"): math.nan if k in stale else metrics[k] for k in metrics}
    known = values | {"epoch": trainer.current_epoch, "step": trainer.global_step}
    try:
        name = pattern.replace("/", "_").format_map(_Early(known) if early else known)
    except (KeyError, ValueError) as error:
        why = f"{error} is not known" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"ModelCheckpoint.filename is '{filename}', but {why}; there are epoch, step"
            f"{''.join(', ' + name for name in sorted(values))}."
        ) from error
    if name.startswith(".") or name in ("", *LINKS):
        raise ConfigError(
            f"ModelCheckpoint.filename is '{filename}', which gives '{name}'; it must name a folder"
            " of its own."
        )
    return name


class _Early(dict[str, Any]):
    def __missing__(self, name: str) -> float:
        return math.nan
