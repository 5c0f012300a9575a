"""SpikeDetection: a loss that jumps is reported once, with its samples."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.by_hand import Pair
from tests.helpers.toy import Line, Net, loader, quiet, rows, weights
from trainkit.api.callback import Callback
from trainkit.callbacks import CrashCapsule, SpikeDetection
from trainkit.errors import ConfigError
from trainkit.extensions.capsule.loss_baseline import LossBaseline


class Given(Line):
    """Returns given losses, one per step, and does not learn."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__(lr=0.0)
        self.losses = losses

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the next loss."""
        return self.model(batch[0]).sum() * 0 + self.losses[self.trainer.global_step]


def run(
    tmp_path: Path, losses: list[float], *more: Any, stop: bool = False, **rule: Any
) -> tuple[SpikeDetection, Any]:
    """Train on these losses; return the detection and the trainer."""
    rule = {"window": 8, "warmup": 2, "deviations": None} | rule
    spikes = SpikeDetection(stop=stop, **rule)
    trainer = quiet(tmp_path, callbacks=[spikes, *more], assert_no_sync=True, log_every_n_steps=2)
    trainer.fit(Given(losses), loader(4 * len(losses)))
    return spikes, trainer


FLAT = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95]


def test_a_leap_is_reported_once_with_step_values_and_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step, loss, usual loss and the data set's indices are reported, and the run continues."""
    spikes, trainer = run(tmp_path, [*FLAT, 9.0, 1.0, 1.0])
    assert spikes.spikes == [(6, 9.0, 1.0)]
    assert trainer.global_step == 9
    out = capsys.readouterr().out
    assert (
        out.count(
            "Loss spike on rank 0 at step 6: 9, usually 1. Samples 24, 25, 26, 27 of the data set."
        )
        == 1
    )
    assert out.count("spike") == 1


def test_of_updates_by_hand_a_batch_has_one_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two optimizers count two steps a batch; the spike's samples are those of its batch."""
    spikes = SpikeDetection(stop=True, window=8, warmup=2, deviations=None)
    trainer = quiet(tmp_path, callbacks=[spikes], log_every_n_steps=3)
    trainer.fit(Pair([*FLAT, 9.0, 1.0, 1.0, 1.0]), loader(40))
    assert spikes.spikes == [(12, 9.0, 1.0)]
    assert "at step 12: 9, usually 1. Samples 24, 25, 26, 27" in capsys.readouterr().out
    assert trainer.global_step == 18  # at the next of its log steps


def test_of_spikes_in_a_row_the_first_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All spikes are recorded; a series as long as the window becomes the baseline."""
    spikes, _ = run(tmp_path, [*FLAT, *[9.0] * 12, 40.0])
    assert [step for step, _, _ in spikes.spikes] == [*range(6, 14), 18]
    assert spikes.spikes[-1] == (18, 40.0, 9.0)
    assert capsys.readouterr().out.count("Loss spike") == 2


@pytest.mark.parametrize(("finite_only", "found"), [(True, [6, 8]), (False, [])])
def test_what_is_not_finite_is_a_spike_where_asked_for(
    tmp_path: Path, finite_only: bool, found: list[int]
) -> None:
    """It is reported once per series, and does not change the baseline."""
    losses = [*FLAT, math.nan, 1.0, math.inf, math.nan, 1.0]
    spikes, _ = run(tmp_path, losses, finite_only=finite_only)
    assert [step for step, _, _ in spikes.spikes] == ([6, 8, 9] if found else [])
    assert spikes._usual.median == 1.0


@pytest.mark.parametrize(
    ("rule", "loss", "is_spike"),
    [
        ({"rtol": 2.0}, 3.1, True),
        ({"rtol": 2.0}, 2.9, False),
        ({"rtol": None, "atol": 0.5}, 1.6, True),
        ({"rtol": None, "atol": 0.5}, 1.4, False),
        ({"rtol": 2.0, "atol": 5.0}, 4.0, False),
        ({"rtol": None, "deviations": 6.0}, 1.5, True),
        ({"rtol": None, "deviations": 6.0}, 1.4, False),
        ({"rtol": 2.0}, -9.0, False),
        ({"rtol": 2.0, "mode": "max"}, -1.1, True),
        ({"rtol": 2.0, "mode": "max"}, 9.0, False),
    ],
)
def test_all_limits_must_be_passed(rule: dict[str, Any], loss: float, is_spike: bool) -> None:
    """For losses around 1 with a median deviation of 0.05:
    relative, absolute and robust limits, only on the bad side.
    """
    usual = LossBaseline(
        **(
            {
                "mode": "min",
                "window": 8,
                "warmup": 0,
                "atol": None,
                "rtol": None,
                "deviations": None,
            }
            | rule
        )
    )
    for value in FLAT:
        assert not usual.is_spike(value)
    assert usual.is_spike(loss) is is_spike


def test_the_beginning_is_no_spike() -> None:
    """Losses before `warmup` are never spikes."""
    usual = LossBaseline("min", 8, 5, None, 2.0, None)
    assert not any(usual.is_spike(loss) for loss in [1.0, 1.0, 9.0, 1.0, 1.0])
    assert usual.is_spike(9.0)


def test_constant_losses_are_no_reason_for_alarm() -> None:
    """With constant losses a tiny rise is no spike."""
    usual = LossBaseline("min", 8, 0, None, None, 6.0)
    assert not any(usual.is_spike(1.0) for _ in range(8))
    assert not usual.is_spike(1.005) and usual.is_spike(1.01)


def test_a_run_stops_where_asked_for(tmp_path: Path) -> None:
    """The run ends at the next log step, with the reason."""
    _, trainer = run(tmp_path, [*FLAT, 9.0, 1.0, 1.0, 1.0], stop=True)
    assert trainer.global_step == 8
    assert trainer.state.stop_reason == "loss spike on rank 0 at step 6: 9, usually 1"


def test_the_step_is_kept_in_a_capsule(tmp_path: Path) -> None:
    """A CrashCapsule stores the spike's step with its weights; a non-finite loss is stored once."""
    run(tmp_path, [*FLAT, 9.0, 1.0, math.nan, 1.0], CrashCapsule())
    assert sorted(path.name for path in (tmp_path / "capsules").iterdir()) == [
        "step=6-rank=0",
        "step=8-rank=0",
    ]
    about = json.loads((tmp_path / "capsules" / "step=6-rank=0" / "manifest.json").read_text())
    assert about["why"] == "loss spike on rank 0 at step 6: 9, usually 1"
    assert about["weights"].startswith("of this step")


def test_samples_of_spikes_are_written_where_asked_for(tmp_path: Path) -> None:
    """One line per spike, one file per rank."""
    run(
        tmp_path,
        [*FLAT, 9.0, math.nan],
        exclude_batches_path=str(tmp_path / "bad" / "spikes.jsonl"),
    )
    lines = [
        json.loads(line)
        for line in (tmp_path / "bad" / "spikes-rank=0.jsonl").read_text().splitlines()
    ]
    assert lines[0] == {
        "step": 6,
        "rank": 0,
        "loss": 9.0,
        "usual": 1.0,
        "samples": [24, 25, 26, 27],
    }
    assert (lines[1]["loss"], lines[1]["step"]) == ("nan", 7)


def test_shuffled_samples_are_named_by_their_indices(tmp_path: Path) -> None:
    """The indices are the data set's;
    finding them reads nothing off the device, with a capsule neither.
    """
    seen: list[list[float]] = []

    class Keep(Given):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(batch[0][:, 0].tolist() if batch_idx == 6 else [])
            return super().training_step(batch, batch_idx)

    path, data = tmp_path / "spikes.jsonl", rows(28)
    spikes = SpikeDetection(window=8, warmup=2, deviations=None, exclude_batches_path=str(path))
    trainer = quiet(tmp_path, callbacks=[spikes, CrashCapsule()])
    trainer.fit(Keep([*FLAT, 9.0]), loader(data, shuffle=True))
    (line,) = [
        json.loads(text) for text in path.with_name("spikes-rank=0.jsonl").read_text().splitlines()
    ]
    assert data.tensors[0][line["samples"], 0].tolist() == seen[6]
    quiet(
        tmp_path,
        callbacks=[SpikeDetection(window=8, warmup=2), CrashCapsule()],
        assert_no_sync=True,
    ).fit(Given([*FLAT, 9.0]), loader(data, shuffle=True))
    assert (tmp_path / "capsules" / "step=6-rank=0" / "manifest.json").is_file()


def test_what_is_usual_is_kept_over_a_restart() -> None:
    """A resumed run restores its baseline."""
    first, second = SpikeDetection(warmup=0), SpikeDetection(warmup=0)
    for loss in FLAT:
        first._usual.is_spike(loss)
    second.load_state_dict(first.state_dict())
    assert second._usual.median == 1.0 and second._usual.is_spike(9.0)


def test_a_watched_run_is_the_same_run(tmp_path: Path) -> None:
    """A watched run is bit-identical."""
    watched, plain = Net(), Net()
    quiet(tmp_path, callbacks=[SpikeDetection()], accumulate_grad_batches=2).fit(
        watched, loader(23)
    )
    quiet(tmp_path, accumulate_grad_batches=2).fit(plain, loader(23))
    assert torch.equal(weights(watched), weights(plain))


def test_what_says_nothing_is_refused() -> None:
    """A rule without a limit, or a window of one loss, is refused."""
    with pytest.raises(
        ConfigError, match=r"callbacks\.spikes: atol, rtol and deviations are all null"
    ):
        SpikeDetection(rtol=None, deviations=None)
    with pytest.raises(ConfigError, match=r"callbacks\.spikes\.window is 1; it must be 2 or more"):
        SpikeDetection(window=1)


def test_of_weights_that_are_spoilt_no_sample_is_accused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every later loss is nan: it is reported once, and no sample is written for exclusion."""

    class Spoils(Callback):
        def on_train_step_start(self, trainer: Any, task: Any) -> None:
            if trainer.global_step == 2:
                with torch.no_grad():
                    task.model.bias.fill_(float("nan"))

    watch = SpikeDetection(exclude_batches_path=str(tmp_path / "bad.jsonl"))
    quiet(tmp_path, callbacks=[watch, Spoils()]).fit(Line(), loader(24))
    out = capsys.readouterr().out
    assert (
        out.count("The loss of rank 0 is nan at step 2, because weights are not finite.") == 1
        and "Samples" not in out
    )
    assert watch.spikes == [] and not list(tmp_path.glob("bad*"))
