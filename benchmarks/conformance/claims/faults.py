"""Faults: what becomes of a job when a rank dies, raises or hangs, at a signal, on a full disk."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.conformance.cell import TIMED_OUT, Cell, FailsError
from benchmarks.conformance.claims.table import claim, require_close
from benchmarks.conformance.work import Fit

RUN = Fit(epochs=2, kill_after=5)
HANG_LIMIT_S = 15


def ended(cell: Cell, fit: Fit) -> str:
    """Start two ranks, and require that the job ends with an error.

    Raises:
        FailsError: it does not end, or with exit code 0.
    """
    run = cell.launch(fit)
    if run.codes[0] == TIMED_OUT:
        raise FailsError(f"the job did not end within {run.seconds:.0f} s")
    if run.codes[0] == 0:
        raise FailsError("the job ended with exit code 0")
    return run.text


@claim("faults")
def a_rank_is_killed(cell: Cell) -> str:
    """If one of two ranks is killed, the job ends by itself with an exit code that is not 0."""
    ended(cell, replace(RUN, die_on=1))
    return "the job ended"


@claim("faults")
def a_rank_raises(cell: Cell) -> str:
    """An exception on one of two ranks ends the job, and its text is printed."""
    text = ended(cell, replace(RUN, raise_on=1))
    if "sample 13 of rank 1 cannot be read" not in text:
        raise FailsError("the job ended, and its output does not have the error's text")
    return "the job ended, with the error's text"


@claim("faults")
def a_rank_hangs(cell: Cell) -> str:
    """If one of two ranks hangs, the job ends in the time that it was given for that (15 s)."""
    text = ended(cell, replace(RUN, hang_on=1, limit_of_hangs=HANG_LIMIT_S))
    of_hangs = ("hang", "hung", "not respond", "stall", "waits")
    named = any(
        "rank 1" in line.lower() and any(name in line for name in of_hangs)
        for line in text.splitlines()
    )
    return "the job ended, and named rank 1" if named else "the job ended; no rank is named"


@claim("faults")
def a_signal_leaves_a_checkpoint(cell: Cell) -> str:
    """SIGTERM ends the run within some seconds, with a checkpoint of its last update: a resumed run
    ends with the weights of one that got no signal.
    """
    fit = Fit(shuffle=True, save_every=1000)
    whole = cell.fit(fit)
    stopped = cell.attempt(replace(fit, kill_after=5, terminate_on=0))
    done = len(stopped.first.get("seen", ()))
    if done > 20:
        raise FailsError(f"the run continued for {done} of 32 updates")
    try:
        resumed = cell.fit(replace(fit, resume=True), stopped)
    except Exception as error:
        raise FailsError(f"the run ended, and cannot be resumed: {error}") from error
    if resumed.first["updates"] + 5 > 32:
        raise FailsError(f"{resumed.first['updates']} of 32 updates after resuming: begun again")
    return require_close(whole, resumed, 0.0)


@claim("faults")
def a_signal_to_one_rank(cell: Cell) -> str:
    """SIGTERM to one of two ranks ends both by themselves, with a checkpoint."""
    fit = Fit(shuffle=True, save_every=1000, kill_after=5, terminate_on=1)
    run = cell.launch(fit)
    if run.codes[0] == TIMED_OUT:
        raise FailsError(f"the job did not end within {run.seconds:.0f} s")
    files = [p for p in (run.folder / "run").rglob("*") if p.is_file() and p.stat().st_size > 1000]
    done = len(run.first.get("seen", ()))
    if done >= 16:
        raise FailsError(f"the job continued to its end: {done} of 16 updates")
    if not files:
        raise FailsError("the job ended without a checkpoint")
    return "the job ended, with a checkpoint"


@claim("faults", own=True)
def a_full_disk(cell: Cell) -> str:
    """If the disk takes no second checkpoint, the run trains on to its end, and the first one is
    whole: it can be resumed.
    """
    fit = Fit(shuffle=True, save_every=16, epochs=3, width=2000, lr=0.0005)
    whole = cell.fit(fit)
    files = [p for p in (whole.folder / "run").rglob("*") if p.is_file()]
    size = max(p.stat().st_size for p in files) // 2
    full = cell.attempt(replace(fit, largest_file=size, limit_after=20))
    if full.codes[0]:
        raise FailsError(f"the run ended: {full.last_line}")
    apart = require_close(whole, full, 0.0)
    killed = cell.attempt(replace(fit, largest_file=size, limit_after=20, kill_after=40))
    resumed = cell.fit(replace(fit, resume=True), killed)
    return f"{apart}; " + require_close(whole, resumed, 0.0, "resumed weights")
