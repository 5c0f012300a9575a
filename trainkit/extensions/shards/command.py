"""data pack: a folder of images to tar files,
which conf/data/webdataset.yaml reads from a folder or an object store.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.cli.guard import fail, guarded
from trainkit.cli.options import count, read_keys
from trainkit.cli.usage import help_text
from trainkit.console import console_of, plural, short
from trainkit.errors import ConfigError
from trainkit.extensions.shards.usage import USAGE
from trainkit.launch.environment import read_launcher

_KEYS = USAGE.keys()
_REFRESH_RATE = 4.0


def main(command: str, arguments: Sequence[str]) -> int:
    """Run `data pack IMAGES output=FOLDER|URL [key=value ...]`; return the exit code."""
    launcher = read_launcher()
    if "-h" in arguments or "--help" in arguments:
        print(help_text(command, USAGE))
        return 0
    try:
        if not arguments or arguments[0].partition("=")[0] in _KEYS:
            raise ConfigError(
                f"The images are missing: a folder of them: {command} IMAGES output=FOLDER|URL"
            )
        given = read_keys(arguments[1:], _KEYS, command)
        if "output" not in given:
            raise ConfigError(
                "output is missing; it must be the folder or URL to write, as s3://bucket/imagenet."
            )
        numbers: dict[str, Any] = {"shard_mb": _megabytes(given.get("shard_mb", "256"))}
        for key, default in (("seed", 0), ("workers", 4)):
            numbers[key] = (
                count(key, given[key], least=key == "workers") if key in given else default
            )
    except ConfigError as error:
        return fail(error, launcher, str(error), error.exit_code)
    return guarded(lambda: _work(Path(arguments[0]), given["output"], **numbers), launcher)


def _megabytes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(
            f"shard_mb is '{text}'; it must be a number above 0: the size of a tar in 10^6 bytes,"
            " about."
        )
    return number


def _work(source: Path, output: str, shard_mb: float, seed: int, workers: int) -> None:
    """Write the shards, with a progress bar. torch is imported here, after all checks."""
    packer: Any = importlib.import_module("trainkit.extensions.shards.packer")
    stores: Any = importlib.import_module("trainkit.extensions.shards.store")
    progress: Any = importlib.import_module("trainkit.callbacks.progress.progress")
    output = output if "://" in output else str(Path(output).absolute())
    store = stores.ShardStore()
    began = time.monotonic()
    lines = []
    packings = packer.plan_of(source, output, int(shard_mb * 1e6), seed)
    screen = progress.make_screen(console_of(), _REFRESH_RATE)

    def moved(num_bytes: int) -> None:
        screen.moved(
            num_bytes // 10**6,
            f"{num_bytes / 1e6 / max(1e-9, time.monotonic() - began):,.0f} MB/s",
            (),
        )

    try:
        for packing in packings:
            screen.begin("MB", packing.num_bytes // 10**6)
            index = packer.pack(packing, store, moved, workers)
            lines.append(
                f"wrote    {packing.output}: {index.num_samples:,} images of {len(index.classes):,}"
                f" classes in {plural(len(index.shards), 'shard')}, {index.num_bytes / 1e9:,.2f} GB"
            )
            screen.end()
    finally:
        screen.close()
    print("\n".join(lines))
    if len(packings) == 2:
        print(
            "train    python -m trainkit fit conf=resnet50 data=webdataset "
            f"data.root={short(output) if output[0] == '/' else output} ",
            end="",
        )
        print(f"data.num_classes={len(packings[0].classes)}", flush=True)
