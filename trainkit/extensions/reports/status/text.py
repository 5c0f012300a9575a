"""A run's status as a table, as one line, and as plain values."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from trainkit.console import plural, short
from trainkit.extensions.reports.show.files import SavedCheckpoint
from trainkit.extensions.reports.status.status import Alert, Status, written_s
from trainkit.run.progress_file import Progress

_COLOURS = {
    "running": "green",
    "ended": "green",
    "starting": "yellow",
    "waiting": "yellow",
    "stopped": "yellow",
}
_MOST_ALERTS = 5
_MOST_HOSTS = 8
_MOST_ALERTS_JSON = 100
_LONGEST = 300


def table_of(status: Status) -> Table:
    """Return what a terminal shows."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    state = Text(status.state, style=_COLOURS.get(status.state, "red"))
    table.add_row(state, _joined([short(status.folder), status.why], ": "))
    for name, text in _rows(status):
        if text:
            table.add_row(name, Text(text))
    for alert in status.alerts[-_MOST_ALERTS:]:
        table.add_row(Text("alert", style="red"), Text(_alert(alert)))
    if (more := len(status.alerts) - _MOST_ALERTS) > 0:
        table.add_row("", f"and {plural(more, 'earlier alert')} (--json)")
    return table


def line_of(status: Status) -> str:
    """Return one line, for a file or a pipe."""
    done = status.progress
    progress = []
    if done is not None:
        progress = [
            f"step {_of(done.step, done.total_steps)}",
            _epoch(done),
            _rate(done),
            _left(status),
        ]
    last = _checkpoint(status.checkpoints[-1]) if status.checkpoints else "no checkpoint"
    alerts = plural(len(status.alerts), "alert") if status.alerts else ""
    why = status.why if status.state not in ("running", "ended") else ""
    return "  ".join(
        filter(None, [time.strftime("%H:%M:%S"), status.state, why, *progress, last, alerts])
    )


def facts_of(status: Status) -> dict[str, Any]:
    """Return all that is known, as plain values; docs/logging.md describes them."""
    facts: dict[str, Any] = {
        "run_dir": str(status.folder),
        "state": status.state,
        "why": status.why,
        "silent_s": status.silent_s,
    }
    progress = status.progress
    facts["ranks"] = None if progress is None else progress.ranks
    facts["restarts"] = None if progress is None else progress.num_starts - 1
    facts["progress"] = None if progress is None else asdict(progress)
    facts["checkpoints"] = [
        {
            "name": saved.name,
            "step": saved.step,
            "epoch": saved.epoch,
            "marks": list(saved.marks),
            "age_s": written_s(saved),
        }
        | {"metrics": dict(saved.metrics), "num_bytes": saved.num_bytes}
        for saved in status.checkpoints
    ]
    facts["stores"] = status.stores
    facts["goodput"] = status.goodput or None
    facts["alerts"] = [asdict(alert) for alert in status.alerts[-_MOST_ALERTS_JSON:]]
    return facts


def _rows(status: Status) -> Iterable[tuple[str, str]]:
    progress = status.progress
    if progress is not None:
        share = (
            f" ({100 * progress.step / progress.total_steps:.0f} %)" if progress.total_steps else ""
        )
        yield (
            "step",
            _joined(
                [
                    f"{_of(progress.step, progress.total_steps)}{share}",
                    _epoch(progress),
                    progress.task,
                ]
            ),
        )
        yield "rate", _joined([_rate(progress), _left(status)])
        yield (
            "ranks",
            _joined(
                [f"{plural(progress.ranks, 'rank')} on {_hosts(progress)}", _launcher(progress)]
            ),
        )
    yield (
        "checkpoint",
        _joined([_checkpoint(saved) for saved in _shown(status.checkpoints)] or _none(status)),
    )
    if status.stores:
        yield "", f"those in {', '.join(status.stores)} are not looked at"
    if progress is not None:
        yield "starts", _starts(progress)
    if status.goodput:
        seconds = status.goodput["seconds"]
        lost = sorted(((s, part) for part, s in seconds.items() if part != "steps"), reverse=True)[
            :2
        ]
        parts = ", ".join(f"{part} {duration(s)}" for s, part in lost if s >= 1)
        total = f"{100 * status.goodput['goodput']:.1f} % of {duration(sum(seconds.values()))}"
        yield "goodput", total + f" (the rest: {parts})" * bool(parts)
    if progress is not None:
        silent = "" if status.silent_s is None else f"last written {duration(status.silent_s)} ago"
        yield (
            "process",
            _joined(
                [
                    f"rank 0 is process {progress.pid} on {progress.host}",
                    progress.prometheus,
                    silent,
                ]
            ),
        )


def _none(status: Status) -> list[str]:
    return [] if status.stores else ["none yet"]


def _shown(checkpoints: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Return the newest checkpoint and the best one."""
    return [
        saved
        for saved in reversed(checkpoints)
        if saved is checkpoints[-1] or "best" in saved.marks
    ]


def _checkpoint(saved: SavedCheckpoint) -> str:
    age = written_s(saved)
    marks = f" ({', '.join(saved.marks)})" if saved.marks else ""
    return f"checkpoint of step {saved.step}{marks}" + (
        f" {duration(age)} ago" if age is not None else ""
    )


def _starts(progress: Progress) -> str:
    if progress.num_starts < 2:
        return ""
    last = progress.starts[-1]
    how = {
        "start": "started",
        "resume": "resumed from a checkpoint",
        "recovery": "continued after a change of ranks",
    }
    ranks = " -> ".join(str(start.ranks) for start in progress.starts[-6:])
    return (
        f"{progress.num_starts}; the last {how.get(last.how, last.how)} at step {last.step}; ranks"
        f" {ranks}"
    )


def _hosts(progress: Progress) -> str:
    shown = [f"{host} ({', '.join(map(str, ranks))})" for host, ranks in progress.hosts.items()]
    more = f" and {len(shown) - _MOST_HOSTS} more" if len(shown) > _MOST_HOSTS else ""
    return f"{plural(len(shown), 'host')}: {', '.join(shown[:_MOST_HOSTS])}{more}"


def _launcher(progress: Progress) -> str:
    by = f" under {progress.launcher}" if progress.launcher != "none" else ""
    return f"engine {progress.engine}{by}{', elastic' * bool(progress.job)}"


def _epoch(progress: Progress) -> str:
    within = (
        f", step {_of(progress.step_in_epoch, progress.steps_in_epoch)}"
        if progress.step_in_epoch
        else ""
    )
    if progress.max_epochs is not None and progress.epoch >= progress.max_epochs:
        return f"{plural(progress.max_epochs, 'epoch')} done"
    return f"epoch {_of(progress.epoch + 1, progress.max_epochs)}{within}"


def _rate(progress: Progress) -> str:
    if progress.steps_per_s is None or progress.samples_per_s is None:
        return ""
    return f"{_number(progress.steps_per_s)} steps/s, {_number(progress.samples_per_s)} samples/s"


def _left(status: Status) -> str:
    left = status.progress.seconds_left if status.progress is not None else None
    return (
        f"{duration(left)} left"
        if left is not None and status.state in ("running", "waiting")
        else ""
    )


def _alert(alert: Alert) -> str:
    text = alert.text if len(alert.text) <= _LONGEST else f"{alert.text[: _LONGEST - 3]}..."
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(alert.unix_s))} {text}"


def _of(number: int, total: int | None) -> str:
    return f"{number:,} of {total:,}" if total is not None and total >= 0 else f"{number:,}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _joined(texts: Iterable[str], by: str = "  ") -> str:
    return by.join(filter(None, texts))


def duration(seconds: float) -> str:
    """Return "34 s", "4 min 20 s", "3 h 5 min" or "2 d 3 h"."""
    left = round(seconds)
    for unit, size, smaller, part in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if left >= size:
            whole, rest = divmod(left, size)
            return f"{whole} {unit} {rest // part} {smaller}"
    return f"{left} s"
