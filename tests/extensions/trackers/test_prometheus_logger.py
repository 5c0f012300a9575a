"""The exporter: the exports of a real run, which it never disturbs."""

from __future__ import annotations

import math
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.by_hand import Pair
from tests.helpers.prometheus_scrape import Samples, Scrapes, exported
from tests.helpers.threads import ThreadEngine, World
from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import ModelCheckpoint
from trainkit.errors import ConfigError
from trainkit.extensions.insight.device_stats import DeviceStats
from trainkit.extensions.trackers.series import SERIES, Board
from trainkit.loggers import PrometheusLogger
from trainkit.version import __version__

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")


def one(samples: Samples, series: str, /, **labels: str) -> float:
    """Return the value of a series with these labels."""
    (value,) = [value for own, value in samples[series] if labels.items() <= own.items()]
    return value


def test_a_run_exports_where_it_is(tmp_path: Path) -> None:
    """Steps, epochs, samples and the values that were logged, at the end of each epoch."""
    before = time.time()
    first, second = exported(tmp_path, max_epochs=2)
    assert [one(s, "trainkit_global_step") for s in (first, second)] == [2, 4]
    assert [one(s, "trainkit_epoch") for s in (first, second)] == [0, 1]
    assert [one(s, "trainkit_steps_total") for s in (first, second)] == [2, 4]
    assert [one(s, "trainkit_samples_total") for s in (first, second)] == [8, 16]
    assert one(first, "trainkit_planned_steps") == 4
    assert one(first, "trainkit_restarts") == 0
    assert one(first, "trainkit_metric", name="lr") == pytest.approx(0.1)
    assert one(first, "trainkit_metric", name="train/loss") == one(first, "trainkit_loss")
    assert one(first, "trainkit_metric", name="val/loss") == pytest.approx(0.5086, abs=1e-3)
    assert (
        before
        < one(first, "trainkit_last_step_timestamp_seconds")
        < one(second, "trainkit_last_step_timestamp_seconds")
    )
    assert one(first, "trainkit_last_progress_timestamp_seconds") > one(
        first, "trainkit_last_step_timestamp_seconds"
    )
    info = {"version": __version__, "task": "Line", "engine": "single", "world_size": "1"}
    assert one(first, "trainkit_info", **info) == 1


def test_a_run_exports_where_its_time_goes(tmp_path: Path) -> None:
    """Each step is in the histogram; the shares of its parts add up to one."""
    (samples,) = exported(tmp_path, max_epochs=1)
    assert one(samples, "trainkit_step_seconds_count") == 2
    assert one(samples, "trainkit_step_seconds_bucket", le="+Inf") == 2
    assert 0 < one(samples, "trainkit_step_seconds_sum") < 60
    buckets = [value for _, value in samples["trainkit_step_seconds_bucket"]]
    assert buckets == sorted(buckets)
    shares = {labels["part"]: value for labels, value in samples["trainkit_step_share_ratio"]}
    assert set(shares) == {"data", "compute", "communication", "optimizer", "hooks"}
    assert sum(shares.values()) == pytest.approx(1)
    assert one(samples, "trainkit_samples_per_second") > 0


def test_the_parts_of_time_are_read_at_log_steps(tmp_path: Path) -> None:
    """Of updates by hand each n-th batch is one, over epochs."""
    first, second = exported(tmp_path, Pair(), max_epochs=2, log_every_n_steps=4)
    assert [one(s, "trainkit_global_step") for s in (first, second)] == [4, 8]
    assert not first.get("trainkit_samples_per_second")
    assert one(second, "trainkit_samples_per_second") > 0


@pytest.mark.parametrize("name", ["train/loss", "train/loss_step"])
def test_the_loss_is_found_by_either_name(name: str) -> None:
    """A value logged by step and by epoch, as the recipes' loss, has a suffix;
    the epoch's value is separate.
    """
    board = Board({}, {}, DeviceStats(torch.device("cpu")), "train/loss")
    board.take_metrics({name: 0.5})
    board.take_metrics({"train/loss_epoch": 9.0, "val/loss": 8.0})
    assert board.numbers["trainkit_loss"] == 0.5


def test_a_run_exports_its_host(tmp_path: Path) -> None:
    """Memory and load are exported; without GPUs there are no GPU series."""
    pytest.importorskip("psutil", reason="psutil is not installed")
    (samples,) = exported(tmp_path, max_epochs=1)
    assert (
        0
        < one(samples, "trainkit_process_memory_bytes")
        < one(samples, "trainkit_host_memory_total_bytes")
    )
    assert 0 <= one(samples, "trainkit_cpu_utilization_ratio") <= 1
    assert not [name for name in samples if "gpu" in name]


def test_every_series_says_of_which_run_rank_and_host_it_is(tmp_path: Path) -> None:
    """Each has exactly the labels of its table entry."""
    (samples,) = exported(tmp_path / "toys" / "mine", max_epochs=1)
    own = {"run": "toys/mine", "rank": "0", "host": socket.gethostname()}
    for name, values in samples.items():
        base = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        expected = {*own, *SERIES[base][1], *(["le"] if name.endswith("_bucket") else [])}
        for labels, _ in values:
            assert own.items() <= labels.items()
            assert set(labels) == expected, name


def test_numbers_that_are_not_finite_are_exported_and_counted(tmp_path: Path) -> None:
    """NaN is a value that Prometheus knows."""

    class Odd(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("odd", math.nan)
            return super().training_step(batch, batch_idx)

    (samples,) = exported(tmp_path, Odd(), max_epochs=1)
    assert math.isnan(one(samples, "trainkit_metric", name="odd"))
    assert one(samples, "trainkit_nonfinite_values_total") == 2


def test_restarts_are_counted_over_processes(tmp_path: Path) -> None:
    """A run resumed twice has two; a run from the start has none."""
    counts = []
    for epochs, path in ((1, None), (2, "last"), (3, "last"), (1, None)):
        samples = exported(tmp_path, None, path, max_epochs=epochs, callbacks=[ModelCheckpoint()])[
            -1
        ]
        counts.append(one(samples, "trainkit_restarts"))
    assert counts == [0, 1, 2, 0]


def test_a_disk_that_takes_nothing_does_not_keep_it_from_exporting(tmp_path: Path) -> None:
    """How often the run was started is then absent."""
    (tmp_path / ".starts").mkdir()
    (samples,) = exported(tmp_path, max_epochs=1)
    assert "trainkit_restarts" not in samples
    assert one(samples, "trainkit_global_step") == 2


def test_a_resumed_run_begins_where_it_was(tmp_path: Path) -> None:
    """Its counters are this process's, its steps the run's;
    earlier samples are not added at once.
    """
    exported(tmp_path, max_epochs=1, callbacks=[ModelCheckpoint()])
    (samples,) = exported(tmp_path, None, "last", max_epochs=2, callbacks=[ModelCheckpoint()])
    assert one(samples, "trainkit_global_step") == 4
    assert one(samples, "trainkit_steps_total") == 2
    assert one(samples, "trainkit_samples_total") == 8


def test_the_first_rank_of_a_host_exports_alone(tmp_path: Path) -> None:
    """Of two ranks on a host one serves; samples are those of both."""

    def work(engine: ThreadEngine) -> tuple[Any, list[Samples]]:
        logger = PrometheusLogger(port=0)
        scrapes = Scrapes(logger)
        quiet(tmp_path, engine=engine, logger=logger, log_every_n_steps=1, callbacks=[scrapes]).fit(
            Line(), loader(16)
        )
        return logger.address, scrapes.seen

    (address, (samples,)), (other, nothing) = World(2).run(work)
    assert address is not None
    assert (other, nothing) == (None, [])
    assert one(samples, "trainkit_samples_total", rank="0") == 16
    assert one(samples, "trainkit_info", world_size="2") == 1


def test_a_port_in_use_is_reported_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the remedy."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        quiet(tmp_path, logger=PrometheusLogger(port=port)).fit(Line(), loader(8))
    printed = capsys.readouterr().out
    assert printed.count("PrometheusLogger failed while opening") == 1
    assert f"127.0.0.1:{port} is in use" in printed
    assert "another logger.prometheus.port, or 0 for a free one" in printed


def test_the_address_is_printed_and_closed_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed address of a free port works, and after the fit nothing listens there."""
    logger = PrometheusLogger(port=0)
    quiet(tmp_path, logger=logger).fit(Line(), loader(8))
    assert f"Prometheus: {logger.address} (rank 0" in capsys.readouterr().out
    assert logger.address is not None
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(logger.address)


def test_it_serves_this_host_alone_by_default() -> None:
    """An exporter has no password."""
    assert PrometheusLogger().addr == "127.0.0.1"


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the extra."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(
        ConfigError,
        match=r"PrometheusLogger needs prometheus_client .*pip install 'trainkit\[prometheus\]'",
    ):
        quiet(tmp_path, logger=PrometheusLogger()).fit(Line(), loader(8))


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_is_one(port: int) -> None:
    """0 to 65535."""
    with pytest.raises(ConfigError, match=rf"logger\.prometheus\.port is {port}; it must be"):
        PrometheusLogger(port=port)
