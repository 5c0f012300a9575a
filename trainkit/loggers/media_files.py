"""Media as files: <run_dir>/media/<name>-step=<step>, as png, md, csv, wav or json."""

from __future__ import annotations

import csv
import json
import re
import wave
from pathlib import Path

import numpy as np

from trainkit.metrics.media import Media

_BINS = 64


def write_media(folder: Path, media: Media, step: int) -> Path:
    """Write one thing, and return its file."""
    name = "_".join(
        part for part in re.sub(r"[^\w./-]", "_", media.name).split("/") if part.strip(".")
    )
    suffix = {"image": "png", "text": "md", "table": "csv", "audio": "wav", "histogram": "json"}[
        media.kind
    ]
    path = folder / f"{name or 'unnamed'}-step={step}.{suffix}"
    folder.mkdir(exist_ok=True)
    if media.kind == "image":
        from PIL import Image  # a run without pictures need not import it

        Image.fromarray(media.value).save(path)
    elif media.kind == "text":
        path.write_text(media.value)
    elif media.kind == "table":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([media.columns, *media.value])
    elif media.kind == "audio":
        with wave.open(str(path), "wb") as sound:
            sound.setnchannels(1)
            sound.setsampwidth(2)
            sound.setframerate(media.sample_rate)
            sound.writeframes((media.value * 32767).astype("<i2").tobytes())
    else:
        counts, edges = np.histogram(media.value[np.isfinite(media.value)], bins=_BINS)
        path.write_text(json.dumps({"edges": edges.tolist(), "counts": counts.tolist()}))
    return path
