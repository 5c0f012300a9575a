"""Resume: a run that is killed after update 5 and resumed is the run that was not killed."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.conformance.cell import Cell, FailsError, Outcome
from benchmarks.conformance.claims.table import (
    claim,
    difference,
    interrupted,
    require_close,
    require_each_once,
    require_equal,
)
from benchmarks.conformance.work import Fit

MIDDLE = Fit(dropout=0.2, optimizer="adamw", lr=0.01, shuffle=True, save_every=5)
NOISELESS = replace(MIDDLE, dropout=0.0)


@claim("resume", ranks=(1, 2))
def resume_samples(cell: Cell) -> str:
    """A run killed inside a shuffled epoch and resumed trains on each sample once an epoch."""
    _, stopped, resumed = interrupted(cell, MIDDLE)
    return require_each_once(MIDDLE, stopped, resumed)


@claim("resume", ranks=(1, 2))
def resume_weights(cell: Cell) -> str:
    """A run with dropout, killed inside an epoch and resumed, ends with the weights, bit for bit,
    of a run that was not killed.
    """
    whole, _, resumed = interrupted(cell, MIDDLE)
    return require_close(whole, resumed, 0.0)


@claim("resume")
def resume_at_an_epochs_end(cell: Cell) -> str:
    """A run killed at the end of an epoch and resumed ends with the weights, bit for bit, of a run
    that was not killed.
    """
    fit = replace(MIDDLE, epochs=3, save_every=16)
    whole, _, resumed = interrupted(cell, fit, after=16)
    return require_close(whole, resumed, 0.0)


@claim("resume")
def resume_twice(cell: Cell) -> str:
    """A run that is killed twice inside one epoch, and resumed twice, trains on each sample once
    an epoch.
    """
    first = cell.fit(replace(MIDDLE, kill_after=5))
    second = cell.fit(replace(MIDDLE, resume=True, kill_after=5), first)
    third = cell.fit(replace(MIDDLE, resume=True), second)
    return require_each_once(MIDDLE, first, second, third)


@claim("resume")
def resume_with_workers(cell: Cell) -> str:
    """The same with two loader workers: weights equal, bit for bit."""
    whole, _, resumed = interrupted(cell, replace(MIDDLE, workers=2))
    return require_close(whole, resumed, 0.0)


@claim("resume", own=True)
def resume_augmentation(cell: Cell) -> str:
    """Random augmentation by torch, NumPy and Python in the data set continues as in a run that
    was not killed: weights equal, bit for bit.
    """
    whole, _, resumed = interrupted(cell, replace(NOISELESS, augment=True))
    return require_close(whole, resumed, 0.0)


@claim("resume")
def resume_a_stream(cell: Cell) -> str:
    """A run on an IterableDataset, killed inside an epoch and resumed, trains on each sample once
    an epoch.
    """
    fit = replace(NOISELESS, data="stream", shuffle=False)
    _, stopped, resumed = interrupted(cell, fit)
    return require_each_once(fit, stopped, resumed)


@claim("resume")
def resume_accumulation(cell: Cell) -> str:
    """A run with accumulation, killed inside an epoch and resumed, ends with the weights, bit for
    bit, of a run that was not killed.
    """
    whole, _, resumed = interrupted(cell, replace(MIDDLE, accumulate=2), after=5)
    return require_close(whole, resumed, 0.0)


@claim("resume")
def resume_schedule(cell: Cell) -> str:
    """The rates of the first updates after resuming are those of a run that was not killed."""
    fit = replace(NOISELESS, schedule=True)
    whole, _, resumed = interrupted(cell, fit)
    expected = [round(rate, 9) for rate in whole.first["rates"][5:11]]
    rates = [round(rate, 9) for rate in resumed.first["rates"][:6]]
    return require_equal(rates, expected, "rates")


@claim("resume")
def resume_ema(cell: Cell) -> str:
    """An exponential moving average of the weights continues: equal, bit for bit, to that of a run
    that was not killed.
    """
    fit = replace(NOISELESS, shuffle=False, ema=True, epochs=3, save_every=16)
    whole, _, resumed = interrupted(cell, fit, after=16)
    averages = [run.first["average"] or run.first["weights"] for run in (whole, resumed)]
    apart = difference(*averages)
    if apart:
        raise FailsError(f"averages differ by {apart:.2g}")
    return "averages equal"


@claim("resume")
def resume_ema_inside_an_epoch(cell: Cell) -> str:
    """The average of the weights is the same after a kill inside a shuffled epoch."""
    whole, _, resumed = interrupted(cell, replace(NOISELESS, ema=True))
    averages = [run.first["average"] or run.first["weights"] for run in (whole, resumed)]
    apart = difference(*averages)
    if apart:
        raise FailsError(f"averages differ by {apart:.2g}")
    return "averages equal"


@claim("resume")
def resume_two_optimizers(cell: Cell) -> str:
    """A GAN's two optimizers, killed inside an epoch and resumed: all weights equal, bit for bit."""
    fit = replace(NOISELESS, shuffle=True)
    whole = cell.fit(fit, call="gan")
    stopped = cell.fit(replace(fit, kill_after=5), call="gan")
    resumed = cell.fit(replace(fit, resume=True), stopped, call="gan")
    return require_close(whole, resumed, 0.0)


@claim("resume", ranks=(2,))
def resume_on_another_number_of_ranks(cell: Cell) -> str:
    """A run killed on two ranks inside an epoch and resumed on one, with the same batch of all
    ranks, trains on each sample once an epoch.
    """
    stopped = cell.fit(replace(NOISELESS, kill_after=5))
    alone = replace(NOISELESS, resume=True, batch=8)
    return require_each_once(NOISELESS, stopped, cell.fit(alone, stopped, ranks=1))


@claim("resume")
def resume_best_score(cell: Cell) -> str:
    """The best score survives: after resuming, a worse one is not called the best."""
    fit = replace(NOISELESS, epochs=4, scores=(0.9, 0.2, 0.7, 0.6), validation=4, save_every=16)
    _, _, resumed = interrupted(cell, fit, after=40)
    return require_equal(round(float(resumed.first["values"]["best"]), 4), 0.2, "best score")


@claim("resume")
def resume_patience(cell: Cell) -> str:
    """Early stopping's count survives: with a patience of 3, killed after two epochs without
    improvement, the run ends after the third.
    """
    fit = replace(
        NOISELESS,
        epochs=8,
        scores=(0.2, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1),
        validation=4,
        patience=3,
        save_every=16,
    )
    whole, _, resumed = interrupted(cell, fit, after=50)
    updates = 48 + resumed.first["updates"]
    return require_equal(updates, whole.first["updates"], "updates in all")


def cut_newest(run: Outcome) -> str:
    """Cut the largest file of the newest checkpoint, and its copies, to half; return its name.
    Keras' .bkp is a copy of the checkpoint before.
    """
    files = [p for p in (run.folder / "run").rglob("*") if p.is_file() and not p.is_symlink()]
    files = [p for p in files if p.suffix != ".bkp"]
    size = max(p.stat().st_size for p in files)
    newest = max(
        (p for p in files if p.stat().st_size > 0.9 * size), key=lambda p: p.stat().st_mtime_ns
    )
    whole = newest.read_bytes()
    for path in [p for p in files if p.read_bytes() == whole]:
        path.write_bytes(whole[: len(whole) // 2])
    return newest.name


@claim("resume")
def resume_past_a_torn_checkpoint(cell: Cell) -> str:
    """If the newest checkpoint is cut to half, the run resumes by itself from the one before, and
    ends with the weights of a run that was not killed.
    """
    fit = replace(NOISELESS, shuffle=False, save_every=16, epochs=4, width=2000)
    whole = cell.fit(fit)
    stopped = cell.fit(replace(fit, kill_after=34))
    torn = cell.copy(stopped)
    name = cut_newest(torn)
    resumed = cell.fit(replace(fit, resume=True), torn)
    return f"{name} was cut; " + require_close(whole, resumed, 0.0)


@claim("resume")
def resume_after_a_kill_while_saving(cell: Cell) -> str:
    """A process that is killed in the middle of writing its second checkpoint resumes by itself
    from the first, and ends with the weights of a run that was not killed.
    """
    fit = replace(NOISELESS, shuffle=False, save_every=16, epochs=4, width=2000)
    whole = cell.fit(fit)
    files = [p for p in (whole.folder / "run").rglob("*") if p.is_file()]
    size = max(p.stat().st_size for p in files) // 2
    dying = replace(fit, largest_file=size, kill_writes=True, limit_after=20, kill_after=40)
    killed = cell.fit(dying)
    if killed.codes[0] >= 0:
        raise FailsError(f"the write did not end the process: exit code {killed.codes[0]}")
    return require_close(whole, cell.fit(replace(fit, resume=True), killed), 0.0)
