"""Numerics: ranks, accumulation, clipping, schedules, what is not a number, random numbers."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.conformance.cell import Cell, FailsError
from benchmarks.conformance.claims.table import (
    claim,
    difference,
    require_close,
    require_equal,
)
from benchmarks.conformance.work import Fit

ONE = Fit(rows=32, batch=8, epochs=1)
CLOSE = 2e-6
SHUFFLED = Fit(rows=32, batch=4, epochs=2, shuffle=True)


@claim("numerics")
def a_run_repeats(cell: Cell) -> str:
    """Two runs with the same seed, dropout and shuffle are equal, bit for bit."""
    fit = replace(SHUFFLED, dropout=0.2)
    return require_close(cell.fit(fit), cell.fit(replace(fit, workers=0, nan_at=10_000)), 0.0)


@claim("numerics")
def accumulation_is_a_larger_batch(cell: Cell) -> str:
    """Two microbatches of 4 give the update of one batch of 8."""
    return require_close(cell.fit(ONE), cell.fit(replace(ONE, batch=4, accumulate=2)), CLOSE)


@claim("numerics", ranks=(2,))
def ranks_are_a_larger_batch(cell: Cell) -> str:
    """Two ranks with 4 samples give the updates of one process with 8."""
    return require_close(cell.fit(ONE, ranks=1), cell.fit(replace(ONE, batch=4)), CLOSE)


@claim("numerics", ranks=(2,), own=True)
def order_does_not_depend_on_ranks(cell: Cell) -> str:
    """With a shuffle and the same batch of all ranks, each update of two ranks has the samples that
    it has in one process.
    """
    parts = cell.fit(SHUFFLED).records
    together = [sorted(a + b) for a, b in zip(*(r["seen"] for r in parts), strict=True)]
    whole = [sorted(ids) for ids in cell.fit(replace(SHUFFLED, batch=8), ranks=1).first["seen"]]
    same = sum(a == b for a, b in zip(together, whole, strict=True))
    text = f"{same} of {len(whole)} updates have the same samples"
    if same < len(whole):
        raise FailsError(text)
    return text


@claim("numerics", ranks=(1, 2))
def epochs_have_different_orders(cell: Cell) -> str:
    """A shuffle is another one in each epoch."""
    seen = cell.fit(SHUFFLED).first["seen"]
    half = len(seen) // 2
    if seen[:half] == seen[half:]:
        raise FailsError("both epochs have the same order")
    return "the orders differ"


@claim("numerics", own=True)
def augmentation_does_not_depend_on_workers(cell: Cell) -> str:
    """Random augmentation in the data set is the same with no loader worker and with two."""
    fit = replace(SHUFFLED, augment=True, lr=0.002)
    return require_close(cell.fit(fit), cell.fit(replace(fit, workers=2)), 0.0)


@claim("numerics", ranks=(2,))
def augmentation_differs_over_ranks(cell: Cell) -> str:
    """Dropout draws different numbers on each rank, after the trainer's own seeding."""
    one, other = (r["noise"] for r in cell.fit(replace(SHUFFLED, dropout=0.5, width=64)).records)
    if one == other:
        raise FailsError("both ranks drop the same units")
    return "the ranks drop different units"


@claim("numerics", ranks=(2,))
def ranks_start_equal(cell: Cell) -> str:
    """Ranks that make different weights train from those of rank 0."""
    records = cell.fit(replace(ONE, batch=4, model_seed=-1)).records
    apart = difference(records[0]["start"], records[1]["start"])
    if apart:
        raise FailsError(f"weights of the ranks differ by {apart:.2g} at the start")
    return "weights equal at the start"


@claim("numerics")
def clipping_under_accumulation(cell: Cell) -> str:
    """The norm that is clipped is that of the whole step's gradient, over accumulation."""
    fit = replace(ONE, clip=0.5)
    return require_close(cell.fit(fit), cell.fit(replace(fit, batch=4, accumulate=2)), CLOSE)


@claim("numerics", ranks=(2,))
def clipping_over_ranks(cell: Cell) -> str:
    """The norm that is clipped is that of the whole step's gradient, over ranks."""
    fit = replace(ONE, clip=0.5)
    return require_close(cell.fit(fit, ranks=1), cell.fit(replace(fit, batch=4)), CLOSE)


@claim("numerics", ranks=(2,))
def batch_norm_over_ranks(cell: Cell) -> str:
    """With batch norm synchronised as the trainer offers it, two ranks give the weights and
    statistics of one process, on the CPU.
    """
    fit = replace(ONE, model="norm")
    parts = cell.fit(replace(fit, batch=4), call="fit_synchronised")
    return require_close(cell.fit(fit, ranks=1), parts, 1e-5)


def rates(count: int, lr: float = 0.05) -> list[float]:
    """Return the rates of `count` updates under the schedule of a Fit."""
    return [round(lr * 0.9**k, 7) for k in range(count)]


@claim("numerics")
def schedule_under_accumulation(cell: Cell) -> str:
    """A schedule in steps moves once an update under accumulation of 2."""
    seen = cell.fit(replace(ONE, batch=4, accumulate=2, schedule=True)).first["rates"]
    return require_equal([round(rate, 7) for rate in seen], rates(4), "rates")


@claim("numerics", ranks=(2,))
def schedule_over_ranks(cell: Cell) -> str:
    """A schedule in steps moves once an update on two ranks."""
    seen = cell.fit(replace(ONE, batch=4, schedule=True)).first["rates"]
    return require_equal([round(rate, 7) for rate in seen], rates(4), "rates")


@claim("numerics")
def schedule_and_a_skipped_update(cell: Cell) -> str:
    """With a float16 loss scale, an update that is skipped for its infinite gradients does not move
    the schedule.
    """
    fit = replace(ONE, schedule=True, precision="16", inf_at=2, epochs=3)
    seen = [round(rate, 7) for rate in cell.fit(fit).first["rates"]]
    if len(seen) > 11:
        raise FailsError(f"{len(seen)} of 12 updates were made: none was skipped")
    return f"{12 - len(seen)} skipped; " + require_equal(seen, rates(len(seen)), "rates")


@claim("numerics")
def nan_is_never_the_best(cell: Cell) -> str:
    """Scores of 0.5, not a number, 0.7: the best checkpoint is that of 0.5."""
    fit = replace(ONE, epochs=3, scores=(0.5, float("nan"), 0.7), validation=4)
    return require_equal(cell.fit(fit).first["values"]["best"][:3], "0.5", "best score")


@claim("numerics")
def nan_first_is_not_the_best(cell: Cell) -> str:
    """Scores of not a number, 0.5, 0.7: the best checkpoint is that of 0.5."""
    fit = replace(ONE, epochs=3, scores=(float("nan"), 0.5, 0.7), validation=4)
    return require_equal(cell.fit(fit).first["values"]["best"][:3], "0.5", "best score")


@claim("numerics")
def nan_is_no_improvement(cell: Cell) -> str:
    """With a patience of 2, scores that are not numbers end the run within 2 epochs."""
    scores = (0.5, *[float("nan")] * 7)
    fit = replace(ONE, epochs=8, scores=scores, validation=4, patience=2)
    updates = cell.fit(fit).first["updates"]
    if updates > 12:
        raise FailsError(f"the run ended after {updates // 4} epochs")
    return f"the run ended after {updates // 4} epochs"


@claim("numerics")
def nan_is_reported(cell: Cell) -> str:
    """A loss that is not a number in one of four updates is seen in the epoch's reported loss, or
    ends the run.
    """
    run = cell.attempt(replace(ONE, nan_at=4))
    if run.codes[0]:
        if not any(name in run.last_line.lower() for name in ("nan", "finite")):
            raise FailsError(f"the run ends with another error: {run.last_line}")
        return f"the run ends: {run.last_line}"
    value = run.first["values"]["loss"]
    if value == value:
        raise FailsError(f"the epoch's loss is reported as {value:.4g}")
    return "the epoch's loss is reported as nan"
