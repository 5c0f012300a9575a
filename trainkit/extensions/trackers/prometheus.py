"""PrometheusLogger: an exporter on each host, scraped by a Prometheus server.
The only home of prometheus_client.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator
from typing import Any

import torch

from trainkit.api.task import Task
from trainkit.api.view import RunView, step_clock_of
from trainkit.arguments import NonNegativeInt, checked
from trainkit.console import info
from trainkit.errors import ConfigError
from trainkit.extensions.insight.device_stats import DeviceStats
from trainkit.extensions.insight.log_steps import is_log_step
from trainkit.extensions.trackers.series import SERIES, Board
from trainkit.loggers.base import Logger, RunFacts
from trainkit.version import __version__


@checked
class PrometheusLogger(Logger):
    """Serves `http://ADDR:PORT/metrics` from the first rank of each host during a fit. Needs the
    extra: `pip install 'trainkit[prometheus]'`.

    trainkit/extensions/trackers/series.py lists the series; each has the labels run (the last two folders of
    its path), rank and host. A Grafana dashboard and alerts are in trainkit/loggers/dashboards/. A
    step stores a few plain numbers; a scrape reads them, and memory and load, in its own thread.

    Args:
        port: port to serve on; 0 takes a free one. The address is printed.
        addr: network address to serve on. The default is readable only from this host; "0.0.0.0" is
            readable from the network, without a password.
        loss: name of the logged value exported as trainkit_loss.
    """

    config_key = "logger.prometheus"
    role = "metrics_server"
    uses_step_clock = True

    def __init__(
        self, port: NonNegativeInt = 9464, addr: str = "127.0.0.1", loss: str = "train/loss"
    ) -> None:
        if port > 65535:
            raise ConfigError(
                f"logger.prometheus.port is {port}; it must be 0 (any free port) to 65535."
            )
        self.port = port
        self.addr = addr
        self.loss = loss
        self.address: str | None = None
        self._board: Board | None = None
        self._server: Any = None

    def on_test_start(self, trainer: RunView, task: Task) -> None:
        """Serve fits alone."""

    def takes_part(self, trainer: RunView) -> bool:
        """Return whether this rank is its host's first: GPUs and memory belong to a host."""
        return trainer.engine.ranks.local_rank == 0

    def require(self) -> None:
        try:
            import prometheus_client.core
        except ImportError as error:
            raise ConfigError(
                f"PrometheusLogger needs prometheus_client ({error}). Run: pip install"
                " 'trainkit[prometheus]'"
            ) from error
        self._prometheus: Any = prometheus_client

    def on_fit_start(self, trainer: RunView, task: Task) -> None:
        self.address = self._board = None
        if not self.takes_part(trainer):
            return
        about = {"version": __version__, "task": type(task).__name__, "engine": trainer.engine.name}
        about["world_size"] = str(trainer.world_size)
        own = trainer.engine.device
        gpus = {str(i): DeviceStats(torch.device(own.type, i)) for i in _gpus_of(trainer)}
        self._board = Board(about, gpus, DeviceStats(own), self.loss)
        self._board.numbers["trainkit_global_step"] = trainer.global_step
        self._board.numbers["trainkit_epoch"] = trainer.current_epoch
        if (planned := trainer.total_steps) is not None:
            self._board.numbers["trainkit_planned_steps"] = planned
        self._samples = trainer.state.samples_seen
        super().on_fit_start(trainer, task)

    def on_train_start(self, trainer: RunView, task: Task) -> None:
        """Start from the clock's first reading."""
        self._times = step_clock_of(trainer).read()
        self._samples_then = trainer.state.samples_seen

    def on_train_step_end(self, trainer: RunView, task: Task) -> None:
        """Store the step; at log_every_n_steps also its parts, which waits for the device."""
        board, state = self._board, trainer.state
        if board is None:
            return
        durations = step_clock_of(trainer).durations
        samples = state.samples_seen
        board.take_step(
            durations[-1] if durations else 0.0,
            samples - self._samples,
            state.global_step,
            state.current_epoch,
        )
        self._samples = samples
        if is_log_step(trainer):
            times = step_clock_of(trainer).read()
            passed = times - self._times
            if (seconds := passed.step_s * passed.steps) > 0:
                board.shares = {part: own / seconds for part, own in passed.seconds.items()}
                board.numbers["trainkit_samples_per_second"] = (
                    samples - self._samples_then
                ) / seconds
            self._times = times
            self._samples_then = samples

    def on_validation_batch_end(
        self,
        trainer: RunView,
        task: Task,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Count progress: a long validation is not a hang."""
        if self._board is not None:
            self._board.get_on()

    def open(self, run: RunFacts) -> None:
        assert self._board is not None
        if run.rank == 0:
            with contextlib.suppress(OSError):  # the exporter must survive a full disk, to show it
                self._board.numbers["trainkit_restarts"] = _note_start(run)
        labels = {
            "run": f"{run.run_dir.parent.name}/{run.run_dir.name}",
            "rank": str(run.rank),
            "host": socket.gethostname(),
        }
        registry = self._prometheus.CollectorRegistry()
        registry.register(_Collector(self._prometheus.core, self._board, labels))
        try:
            self._server, self._thread = self._prometheus.start_http_server(
                self.port, self.addr, registry
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise OSError(
                f"{self.addr}:{self.port} is in use, maybe by another run on this host. Give this"
                " one another logger.prometheus.port, or 0 for a free one, which is printed"
            ) from error
        self.address = f"http://{self.addr}:{self._server.server_port}/metrics"
        info(f"Prometheus: {self.address} (rank {run.rank}, {labels['host']})")

    def write_metrics(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        assert self._board is not None
        self._board.take_metrics(metrics)

    def finalize(self, status: str) -> None:
        if self._server is not None:
            server = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            self._thread.join()


def _note_start(run: RunFacts) -> int:
    """Add a line to `<run_dir>/.starts`; return the number of earlier starts of this run."""
    starts = run.run_dir / ".starts"
    with starts.open("a" if run.resumes else "w") as file:
        file.write(f"{time.time():.0f} {run.global_step} {run.world_size}\n")
    return len(starts.read_text().splitlines()) - 1


def _gpus_of(trainer: RunView) -> range:
    return range(
        min(trainer.engine.ranks.local_size, torch.cuda.device_count())
        if trainer.engine.device.type == "cuda"
        else 0
    )


class _Collector:
    def __init__(self, core: Any, board: Board, labels: dict[str, str]) -> None:
        self._core = core
        self._board = board
        self._labels = labels

    def collect(self) -> Iterator[Any]:
        own = list(self._labels.values())
        values = self._board.gauges()
        for name, (kind, labels, meaning) in SERIES.items():
            names = [*self._labels, *labels]
            if kind == "histogram":
                buckets, total = self._board.histogram()
                family = self._core.HistogramMetricFamily(name, meaning, labels=names)
                family.add_metric(own, buckets, total)
                yield family
                continue
            makes = (
                self._core.CounterMetricFamily
                if kind == "counter"
                else self._core.GaugeMetricFamily
            )
            family = makes(name, meaning, labels=names)
            for of, value in values.get(name, {}).items():
                family.add_metric([*own, *of], value)
            if family.samples:
                yield family
