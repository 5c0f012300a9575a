"""RayReport and TuneReport without Ray:
when they report, what a report holds, a notice, and bad input.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.toy import Line, loader, quiet
from trainkit.callbacks import RayReport, TuneReport
from trainkit.errors import ConfigError, Preempted
from trainkit.extensions.ray import report as ray_report


class FakeRay:
    """ray.train and ray.tune as the callbacks use them, of one worker or trial."""

    def __init__(self, notice_after: int | None = None, stop_after: int | None = None) -> None:
        self.reports: list[tuple[dict[str, Any], list[str] | None]] = []
        self.looks, self.notice_after, self.stop_after = 0, notice_after, stop_after
        self.Checkpoint = SimpleNamespace(
            from_directory=lambda folder: sorted(p.name for p in Path(folder).iterdir())
        )

    def get_context(self) -> Any:
        """Return the context of a worker and of a trial."""
        return SimpleNamespace(get_world_size=lambda: 1, get_trial_id=lambda: "t_00000")

    def get_preemption_info(self) -> Any:
        """Return a notice, if it is time."""
        self.looks += 1
        late = self.notice_after is not None and self.looks > self.notice_after
        return SimpleNamespace(preempted_node_to_ranks={"abcdef123456": [0]}) if late else None

    def report(self, metrics: dict[str, Any], checkpoint: Any = None) -> None:
        """Keep a report."""
        self.reports.append((metrics, checkpoint))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """A fake of Ray that the callbacks find."""
    fake = FakeRay()
    monkeypatch.setattr(ray_report, "_ray", lambda part, callback: fake)
    return fake


@pytest.mark.parametrize("callback", [RayReport, TuneReport])
def test_each_validation_is_reported(callback: Any, ray: FakeRay, tmp_path: Path) -> None:
    """Two validations in each of two epochs:
    four reports with metrics, epoch, step and a checkpoint, which is removed.
    """
    trainer = quiet(tmp_path, max_epochs=2, val_check_interval=0.5, callbacks=[callback()])
    trainer.fit(Line(), loader(24, 4), loader(7))
    assert [(m["epoch"], m["step"]) for m, _ in ray.reports] == [(0, 3), (1, 6), (1, 9), (2, 12)]
    assert all("val/loss" in metrics for metrics, _ in ray.reports)
    assert all(files is not None and "manifest.json" in files for _, files in ray.reports)
    assert not (tmp_path / "reported").exists()


def test_epochs_are_reported_where_there_is_no_validation(ray: FakeRay, tmp_path: Path) -> None:
    """Without validation data a report follows each epoch; without checkpoints none is written."""
    quiet(tmp_path, max_epochs=2, callbacks=[TuneReport(checkpoints=False)]).fit(
        Line(), loader(24, 4)
    )
    assert [(m["epoch"], files) for m, files in ray.reports] == [(1, None), (2, None)]


def test_a_notice_ends_the_run_as_a_signal_does(ray: FakeRay, tmp_path: Path) -> None:
    """Ray's notice that a node goes:
    a checkpoint of the step is reported, and fit raises Preempted, which names the node.
    """
    ray.notice_after = 0
    trainer = quiet(tmp_path, max_epochs=200, callbacks=[RayReport(preemption_interval_s=0.01)])
    with pytest.raises(Preempted) as ended:
        trainer.fit(Line(), loader(24, 4), loader(7))
    assert "Ray's notice that it takes away node abcdef12" in ended.value.text
    assert ray.reports[-1][0]["step"] == trainer.global_step
    assert ray.reports[-1][1] is not None


def test_a_metric_that_is_never_logged_is_an_error(ray: FakeRay, tmp_path: Path) -> None:
    """The first report names the values that there are."""
    with pytest.raises(
        ConfigError, match="search.metric is 'val/acc', which was not logged .* there are val/loss"
    ):
        quiet(tmp_path, callbacks=[TuneReport(metric="val/acc")]).fit(
            Line(), loader(24, 4), loader(7)
        )


@pytest.mark.parametrize(
    ("callback", "where"), [(RayReport, "no worker of it"), (TuneReport, "no trial of it")]
)
def test_outside_of_ray_the_callbacks_say_so(
    callback: Any, where: str, ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that neither Train nor Tune has started is refused before it trains."""

    def refuse() -> Any:
        raise RuntimeError("not here")

    monkeypatch.setattr(ray, "get_context", refuse)
    with pytest.raises(ConfigError, match=where):
        quiet(tmp_path, callbacks=[callback()]).fit(Line(), loader(24, 4))


def test_without_ray_the_callbacks_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the command."""

    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(ConfigError, match=r"pip install 'trainkit\[ray\]'"):
        quiet(tmp_path, callbacks=[RayReport()]).fit(Line(), loader(24, 4))
