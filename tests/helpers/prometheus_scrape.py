"""Reads the exported metrics of a running training, with Prometheus's own parser."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.toy import Line, loader, quiet
from trainkit.api.callback import Callback
from trainkit.loggers import PrometheusLogger

# a sample's name -> (labels, value) of each
Samples = dict[str, list[tuple[dict[str, str], float]]]


def scrape(logger: PrometheusLogger) -> Samples:
    """Return an exporter's answer, after all values are logged."""
    assert logger.settle()
    assert logger.address is not None
    with urllib.request.urlopen(logger.address) as answer:
        text = answer.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, f"{family.name} has no meaning"
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


class Scrapes(Callback):
    """Scrapes at each epoch's end."""

    def __init__(self, logger: PrometheusLogger) -> None:
        self.logger = logger
        self.seen: list[Samples] = []

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        """See Callback."""
        if self.logger.address is not None or trainer.engine.ranks.local_rank == 0:
            self.seen.append(scrape(self.logger))


def exported(
    folder: Path, task: Line | None = None, ckpt_path: str | None = None, **settings: Any
) -> list[Samples]:
    """Train epochs of two steps of four samples each;
    return the exported values at the end of each.
    """
    logger = PrometheusLogger(port=0)
    scrapes = Scrapes(logger)
    own = settings.pop("callbacks", [])
    known: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "callbacks": [*own, scrapes]}
    quiet(folder, **known | settings).fit(task or Line(), loader(8), loader(4), ckpt_path=ckpt_path)
    return scrapes.seen
