"""A loss that is not finite ends the run before the update, with the samples' names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.helpers.toy import Line, loader, quiet, rows, weights
from trainkit.api.state import TrainState
from trainkit.engine.ranks import Ranks
from trainkit.errors import DivergenceError
from trainkit.launch.environment import read_launcher
from trainkit.run.finite import FiniteLosses, LossWatch


def poisoned(value: float, *indices: int) -> TensorDataset:
    """Return rows of which some have a target that makes the loss not finite."""
    x_NI, y_NO = rows(20).tensors
    y_NO = y_NO.clone()
    y_NO[list(indices)] = value
    return TensorDataset(x_NI, y_NO)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_run_ends_before_the_update(tmp_path: Path, value: float) -> None:
    """Step, rank and the samples of the microbatch are named;
    the weights are those of the step before.
    """
    task, before = Line(), Line()
    data = poisoned(value, 13)
    with pytest.raises(DivergenceError) as error:
        quiet(tmp_path, stop_on_nonfinite=True, accumulate_grad_batches=2).fit(task, loader(data))
    assert (
        f"not finite at step 1 (epoch 0): {value} on rank 0, samples 12, 13, 14, 15 of the data set"
        in str(error.value)
    )
    quiet(tmp_path, accumulate_grad_batches=2, max_steps=1).fit(before, loader(data))
    assert torch.equal(weights(task), weights(before))


def test_shuffled_samples_are_named_by_their_indices(tmp_path: Path) -> None:
    """The indices are the data set's, not the places in the epoch's order."""
    seen: list[list[float]] = []

    class Keep(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[0][:, 0].tolist())
            return super().training_step(batch, batch_idx)

    data = poisoned(float("nan"), 5)
    with pytest.raises(DivergenceError) as error:
        quiet(tmp_path, stop_on_nonfinite=True).fit(Keep(), loader(data, shuffle=True))
    named = [int(i) for i in str(error.value).split("samples ")[1].split(" of the")[0].split(", ")]
    assert 5 in named
    assert data.tensors[0][named, 0].tolist() == seen[-1]


def test_a_stream_has_no_indices(tmp_path: Path) -> None:
    """For a stream, step and rank are named."""
    batches = [[torch.ones(2, 3), torch.full((2, 1), float("nan"))]]
    with pytest.raises(DivergenceError, match=r"nan on rank 0\. The weights"):
        quiet(tmp_path, stop_on_nonfinite=True).fit(Line(), batches)


def test_it_is_asked_for(tmp_path: Path) -> None:
    """By default losses are not checked."""
    task = Line()
    quiet(tmp_path).fit(task, loader(poisoned(float("nan"), 3)))
    assert weights(task).isnan().any()


def test_a_finite_run_is_the_same_run(tmp_path: Path) -> None:
    """Looking changes nothing."""
    looked, plain = Line(), Line()
    quiet(tmp_path, stop_on_nonfinite=True).fit(looked, loader())
    quiet(tmp_path).fit(plain, loader())
    assert torch.equal(weights(looked), weights(plain))


def test_a_loss_that_is_written_over_is_looked_at_as_it_was() -> None:
    """A CUDA graph writes each loss to the same place."""
    none: Any = None
    looked, loss = FiniteLosses(none), torch.tensor(1.0)
    looked.look(loss, none)
    loss.fill_(math.nan)
    assert float(looked._seen[0][0]) == 1.0


def test_by_default_a_loss_that_is_not_finite_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run continues, and rank 0 says so when it next logs a step;
    nothing is read in the steps between.
    """
    quiet(tmp_path, max_epochs=3, log_every_n_steps=4).fit(
        Line(), loader(poisoned(float("nan"), 5))
    )
    said = capsys.readouterr().out
    assert said.count("WARNING: the loss is nan at or before step 4 (epoch 0)") == 1
    assert said.count("WARNING") == 1
    assert "trainer.stop_on_nonfinite=true" in said


def test_the_step_is_exact_if_the_one_before_was_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where each step is logged, the step that is named is that of the first such loss."""
    quiet(tmp_path, log_every_n_steps=1).fit(Line(), loader(poisoned(float("nan"), 5)))
    assert "WARNING: the loss is nan at step" in capsys.readouterr().out


def test_a_short_run_reports_at_the_epochs_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run without a logged step reports too; one with finite losses prints nothing."""
    quiet(tmp_path).fit(Line(), loader(poisoned(float("inf"), 19)))
    assert "WARNING: the loss is" in capsys.readouterr().out
    quiet(tmp_path).fit(Line(), loader())
    assert "WARNING" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rank", "alone", "text"),
    [
        (0, False, "WARNING: the loss is nan at or before step 7 (epoch 2)"),
        (1, False, ""),  # rank 0 has it at the next step
        (0, True, "WARNING: the loss of rank 0 is nan at or before step 7 (epoch 2)"),
        (1, True, "WARNING: the loss of rank 1 is nan at or before step 7 (epoch 2)"),
    ],
)
def test_a_rank_that_steps_alone_reports_its_own_loss(
    rank: int, alone: bool, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once; with LocalSGD the others do not have it before the next outer step."""
    ranks = Ranks(read_launcher())
    ranks.assign(rank, 2, rank, 2)
    watch = LossWatch(print, TrainState(global_step=7, current_epoch=2), ranks, lambda: alone)
    for _ in range(2):
        watch.look(torch.tensor(float("nan")))
        watch.report()
    out = capsys.readouterr().out
    assert out.startswith(text) and out.count("WARNING") == bool(text)
