"""What is logged beside numbers: pictures, texts, tables, sounds, histograms;
as plain arrays that every logger can store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from trainkit.errors import TaskError

Kind = Literal["image", "text", "table", "audio", "histogram"]


@dataclass(frozen=True)
class Media:
    """One thing to store."""

    kind: Kind
    name: str
    # image: uint8 [height, width, 3 or 4]; text: str; table: rows; audio: float32 [samples] in
    # -1..1; histogram: float32 [n]
    value: Any
    columns: list[str] = field(default_factory=list)  # of a table
    sample_rate: int = 0  # of a sound, in Hz
    caption: str = ""


def image(name: str, value: Any, caption: str = "") -> Media:
    """Return a picture from a tensor [C, H, W] or [H, W], an array [H, W, C] or [H, W], a PIL image
    or a matplotlib figure.

    Numbers that are not whole are taken to lie from 0 to 1; one channel is grey.

    Raises:
        TaskError: it is none of these.
    """
    if hasattr(value, "canvas"):  # a figure of matplotlib
        value.canvas.draw()
        value = np.asarray(value.canvas.buffer_rgba())
    elif isinstance(value, torch.Tensor):
        value = (
            value.detach().float().cpu().numpy()
            if value.is_floating_point()
            else value.detach().cpu().numpy()
        )
        value = np.moveaxis(value, 0, -1) if value.ndim == 3 else value
    pixels = np.asarray(value)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4):
        raise TaskError(
            f"log_image('{name}', ...) got shape {list(pixels.shape)}; a picture is a tensor [C, H,"
            " W] or [H, W], an array [H, W, C], a PIL image or a matplotlib figure, with 1, 3 or 4"
            " channels."
        )
    if pixels.dtype.kind == "f":
        pixels = (pixels.clip(0, 1) * 255).round()
    pixels = pixels.clip(0, 255).astype(np.uint8)
    return Media(
        "image", name, pixels.repeat(3, axis=2) if pixels.shape[2] == 1 else pixels, caption=caption
    )


def table(name: str, columns: Sequence[str] | None, rows: Any) -> Media:
    """Return a table from rows, or from a dict of columns, as a pandas DataFrame's
    `to_dict("list")`.

    Raises:
        TaskError: a row has another number of cells than there are columns.
    """
    if isinstance(rows, Mapping):
        columns, rows = list(rows), list(zip(*rows.values(), strict=False))
    cells = [
        [part.item() if isinstance(part, (torch.Tensor, np.generic)) else part for part in row]
        for row in rows
    ]
    columns = list(columns or [])
    for place, row in enumerate(cells):
        if len(row) != len(columns):
            raise TaskError(
                f"log_table('{name}', ...): row {place} has {len(row)} cells, and there are"
                f" {len(columns)} columns."
            )
    return Media("table", name, cells, columns=columns)


def audio(name: str, samples: Any, sample_rate: int) -> Media:
    """Return a sound of one channel from numbers from -1 to 1."""
    return Media("audio", name, _numbers(samples).clip(-1, 1), sample_rate=sample_rate)


def histogram(name: str, values: Any) -> Media:
    """Return the numbers of a histogram."""
    return Media("histogram", name, _numbers(values))


def _numbers(values: Any) -> Any:
    numbers = (
        values.detach().float().cpu().numpy()
        if isinstance(values, torch.Tensor)
        else np.asarray(values)
    )
    return numbers.reshape(-1).astype(np.float32)
