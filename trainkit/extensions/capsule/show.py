"""Prints the results of a replay."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainkit.console import console_of, plural
from trainkit.extensions.capsule.replay import Replayed
from trainkit.safety.tracebacks import text_of

_MOST = 8


def show(done: Replayed) -> None:
    """Print the step, the losses, non-finite values, and the largest numbers."""
    console = console_of()
    about = done.about
    rows = [
        (
            "capsule",
            (
                f"step {about['step']} (epoch {about['epoch']}) of rank {about['rank']} of"
                f" {about['world_size']}: {about['why']}"
            ),
        ),
        ("weights", done.weights + _age(done.steps_older)),
        *(("differs", note) for note in done.notes),
    ]
    for i, recorded in enumerate(done.recorded):
        rows.append(
            (
                f"loss {i}" if len(done.recorded) > 1 else "loss",
                _compared(recorded, done.losses[i : i + 1]),
            )
        )
    rows += _findings(done)
    table = Table.grid(padding=(0, 2))
    for name, text in rows:
        table.add_row(Text(name, style="bold"), Text(text, overflow="fold"))
    console.print(table)
    largest = sorted(done.outputs, key=lambda output: -output.largest)[:_MOST]
    _list(
        console,
        "largest activations",
        [
            (f"{o.largest:.4g}{'' if o.finite else ', and not finite'}", o.name, o.kind)
            for o in largest
        ],
    )
    norms = sorted(
        done.gradients.items(), key=lambda item: -item[1] if math.isfinite(item[1]) else -math.inf
    )[:_MOST]
    _list(console, "largest gradient norms", [(f"{norm:.4g}", name, "") for name, norm in norms])
    if done.error is not None:
        console.print(text_of(done.error), soft_wrap=True, markup=False)


def facts_of(done: Replayed) -> dict[str, Any]:
    """Return what a replay has seen, for --json."""
    first = done.first_bad
    return {
        **{key: done.about[key] for key in ("step", "epoch", "rank", "world_size", "why")},
        "weights": done.weights,
        "recorded": list(done.recorded),
        "losses": list(done.losses),
        "bad_inputs": list(done.bad_inputs),
        "bad_weights": list(done.bad_weights),
        "first_bad_module": None if first is None else first.name,
        "bad_gradients": list(done.bad_gradients),
        "updated": done.updated,
        "error": None if done.error is None else f"{type(done.error).__name__}: {done.error}",
    }


def _findings(done: Replayed) -> list[tuple[str, str]]:
    rows = [("batch", text) for text in done.bad_inputs]
    if done.bad_weights:
        rows.append(("weights", f"not finite before the step: {_some(done.bad_weights)}"))
    first = done.first_bad
    if first is not None:
        inputs = (
            "its inputs were finite" if first.inputs_finite else "its inputs were not finite either"
        )
        rows.append(
            (
                "forward",
                (
                    f"the first module with a non-finite output is {first.name} ({first.kind});"
                    f" {inputs}"
                ),
            )
        )
    elif any(not math.isfinite(loss) for loss in done.losses):
        rows.append(
            (
                "forward",
                (
                    "all modules' outputs are finite: the loss becomes non-finite in training_step,"
                    " outside of the modules"
                ),
            )
        )
    if done.bad_gradients:
        rows.append(("backward", f"non-finite gradients: {_some(done.bad_gradients)}"))
    if done.updated is not None:
        rows.append(
            (
                "update",
                "made" if done.updated else "skipped: the gradients overflow at this loss scale",
            )
        )
    if done.error is not None:
        rows.append(("error", f"{type(done.error).__name__}: {done.error}"))
    return rows


def _age(steps: int | None) -> str:
    if steps is None:
        return ", of an unknown step"
    if steps == 0:
        return ""
    return (
        f", {plural(abs(steps), 'step')} {'older' if steps > 0 else 'newer'} than the step: losses"
        " differ"
    )


def _compared(recorded: float | None, now: list[float]) -> str:
    before = "not recorded" if recorded is None else f"recorded {recorded:.9g}"
    if not now:
        return f"{before}, and not reached now"
    same = recorded is not None and (
        recorded == now[0] or (math.isnan(recorded) and math.isnan(now[0]))
    )
    return f"{before}, now {now[0]:.9g}" + (
        ": equal bit for bit" if same else "" if recorded is None else ": DIFFERENT"
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MOST]) + f" and {len(names) - _MOST} more" * (len(names) > _MOST)


def _list(console: Console, title: str, rows: list[tuple[str, str, str]]) -> None:
    if not rows:
        return
    console.print(Text(f"\n{title}", style="bold"))
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*(Text(f"  {cell}") for cell in row))
    console.print(table)
