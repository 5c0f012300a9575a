"""`python -m trainkit data check`:
every sample of a config's data, read once, with a progress bar and a list of bad ones.
"""

from __future__ import annotations

import time
from typing import Any

from trainkit.api.datamodule import StageName
from trainkit.callbacks.progress.progress import make_screen
from trainkit.config.instantiate import data_of, instantiate
from trainkit.console import console_of, plural
from trainkit.data.bad_samples import BadSample
from trainkit.data.seeding import seed_process
from trainkit.errors import ConfigError, DataError
from trainkit.extensions.reports.reading import Reading, readings

_KINDS = {"fit": ("train", "val"), "test": ("test",), "predict": ("predict",)}
_REFRESH_RATE = 4.0


def check_data(
    config: dict[str, Any], stage: StageName, num_workers: int | None, facts: dict[str, Any]
) -> None:
    """Read all samples of a stage's loaders, and print those that raise.

    Args:
        config: resolved and checked.
        stage: "fit" (training and validation data), "test" or "predict".
        num_workers: processes for a loader without workers of its own; None for the number of
            cores.
        facts: receives what --json prints.

    Raises:
        ConfigError: there is no data.
        DataError: samples cannot be loaded; names how many.
    """
    seed_process(config["seed"])
    source = data_of(config) or instantiate(config["task"], "task", config.get("trust") or [])
    source.prepare_data()
    source.setup(stage)
    to_read = readings(
        [(kind, getattr(source, f"{kind}_dataloader")()) for kind in _KINDS[stage]], num_workers
    )
    if not to_read:
        raise ConfigError(
            f"There is no data for stage={stage}: {type(source).__name__} returns no loader for it."
        )
    bad = {reading.name: _read(reading, config["seed"]) for reading in to_read}
    facts |= {"stage": stage, "read": {reading.name: reading.num_samples for reading in to_read}}
    facts["bad"] = {name: [one.describe() for one in samples] for name, samples in bad.items()}
    count = sum(map(len, bad.values()))
    if count:
        raise DataError(
            f"{plural(count, 'sample')} cannot be loaded. Replace or remove them, or train without"
            " them: data.on_bad_sample=skip."
        )


def _read(reading: Reading, seed: int) -> list[BadSample]:
    console = console_of()
    screen = make_screen(console, _REFRESH_RATE)
    unit = "batches" if reading.num_samples is None else "samples"
    bad: list[BadSample] = []
    done = 0
    began = time.monotonic()
    try:
        screen.begin(reading.name, reading.num_samples)
        for count, failed in reading.read(seed):
            done += count
            bad += failed
            for sample in failed:
                screen.say(f"bad sample of {reading.name}: {sample.describe()}")
            rate = done / max(1e-9, time.monotonic() - began)
            screen.moved(done, f"{rate:,.0f} {unit}/s", [f"{len(bad)} bad"] if bad else ())
        screen.end()
        seconds = time.monotonic() - began
        workers = plural(reading.num_workers, "worker")
        screen.say(
            f"{reading.name}: {done:,} {unit} read by {workers} in {seconds:.1f} s, {len(bad)} bad"
        )
    finally:
        screen.close()
    return bad
