"""Means: a step's gradient and a reported value are means over all samples, however these are
split into microbatches and ranks.

Each claim compares a run with one that has the same batch of all ranks in one microbatch, by plain
SGD without a shuffle: Adam's update hides a wrong scale.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.conformance.cell import Cell
from benchmarks.conformance.claims.table import (
    claim,
    require_close,
    require_each_once,
    require_near,
)
from benchmarks.conformance.work import Fit

ONE = Fit(rows=32, batch=8, epochs=1)
CLOSE = 2e-6
STILL = Fit(rows=16, batch=16, epochs=1, lr=0.0)


@claim("means")
def tokens_over_accumulation(cell: Cell) -> str:
    """Sequences of different lengths: two microbatches of 4 give the update of one batch of 8, the
    mean over all tokens.
    """
    whole = replace(ONE, model="tokens")
    halves = replace(whole, batch=4, accumulate=2)
    return require_close(cell.fit(whole), cell.fit(halves), CLOSE)


@claim("means", ranks=(2,))
def tokens_over_ranks(cell: Cell) -> str:
    """Sequences of different lengths: 4 on each of two ranks give the update of one batch of 8, the
    mean over all tokens.
    """
    whole = replace(ONE, model="tokens")
    return require_close(cell.fit(whole, ranks=1), cell.fit(replace(whole, batch=4)), CLOSE)


@claim("means")
def short_last_window(cell: Cell) -> str:
    """Five microbatches in windows of two: the last window, of one, gives the mean over its
    samples.
    """
    whole = replace(ONE, rows=20)
    halves = replace(whole, batch=4, accumulate=2)
    return require_close(cell.fit(whole), cell.fit(halves), CLOSE)


@claim("means")
def short_last_batch(cell: Cell) -> str:
    """A window of a microbatch of 4 and one of 2 gives the mean over its 6 samples."""
    whole = replace(ONE, rows=22)
    halves = replace(whole, batch=4, accumulate=2)
    return require_close(cell.fit(whole), cell.fit(halves), CLOSE)


@claim("means", ranks=(2,))
def uneven_ranks_samples(cell: Cell) -> str:
    """Thirteen samples on two ranks: each is trained on once an epoch."""
    fit = replace(ONE, rows=13, batch=4)
    return require_each_once(fit, cell.fit(fit))


@claim("means", ranks=(2,))
def uneven_ranks_gradient(cell: Cell) -> str:
    """Thirteen samples on two ranks give the updates of one process with the same batch."""
    whole = replace(ONE, rows=13)
    return require_close(cell.fit(whole, ranks=1), cell.fit(replace(whole, batch=4)), CLOSE)


@claim("means")
def evaluation_of_a_short_batch(cell: Cell) -> str:
    """The mean of 17 validation samples in batches of 4 is that of the samples, not of the
    batches.
    """
    fit = replace(STILL, validation=17, batch=4)
    return require_near(cell.fit(fit).first["values"]["score"], 8.0, "mean score")


@claim("means", ranks=(2,))
def evaluation_over_ranks(cell: Cell) -> str:
    """Validation of 17 samples on two ranks counts each once."""
    fit = replace(STILL, validation=17, batch=4)
    return require_near(cell.fit(fit).first["values"]["score"], 8.0, "mean score")


@claim("means")
def training_loss_of_an_epoch(cell: Cell) -> str:
    """The reported loss of an epoch of 13 samples in batches of 4 is their mean."""
    fit = replace(STILL, rows=13)
    parts = cell.fit(replace(fit, batch=4)).first["values"]["loss"]
    return require_near(parts, cell.fit(fit).first["values"]["loss"], "loss")


@claim("means", ranks=(2,))
def training_loss_over_ranks(cell: Cell) -> str:
    """The reported loss of an epoch on two ranks is the mean over both ranks' samples."""
    parts = cell.fit(replace(STILL, batch=4)).first["values"]["loss"]
    return require_near(parts, cell.fit(STILL, ranks=1).first["values"]["loss"], "loss")


@claim("means")
def training_loss_under_accumulation(cell: Cell) -> str:
    """The reported loss does not depend on the accumulation: neither divided nor multiplied."""
    parts = cell.fit(replace(STILL, batch=4, accumulate=2)).first["values"]["loss"]
    return require_near(parts, cell.fit(STILL).first["values"]["loss"], "loss")


@claim("means", ranks=(2,))
def metric_object_over_ranks(cell: Cell) -> str:
    """A metric object (accuracy) of 17 validation samples on two ranks is that of the samples."""
    fit = replace(STILL, validation=17, batch=4)
    value = cell.fit(fit, call="accuracy").first["values"]["accuracy"]
    return require_near(value, 6 / 17, "accuracy")
