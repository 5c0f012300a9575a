"""find: finds a setting by measuring the job itself, at the ranks that the launcher started."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.cli.as_json import split_json
from trainkit.cli.guard import fail
from trainkit.cli.options import count
from trainkit.cli.usage import help_text
from trainkit.console import console_of, plural, short
from trainkit.errors import ConfigError, did_you_mean
from trainkit.extensions.find.page import write_lr_page
from trainkit.extensions.find.usage import USAGE
from trainkit.extensions.reports.grid import Grid, human, share
from trainkit.extensions.script.command_line import split_script
from trainkit.extensions.script.entry import look_at
from trainkit.extensions.script.own_options import split_own
from trainkit.launch.environment import read_launcher

if TYPE_CHECKING:
    from trainkit.extensions.script.subject import Subject

Found = dict[str, Any] | None  # for --json; None on ranks that print nothing

_OWN = {
    "lr": ("min_lr", "max_lr", "steps", "early_stop"),
    "batch": ("memory_gb", "most"),
    "workers": ("steps", "most"),
    "settings": ("steps",),
}
_WRITE = (
    " Put the loop's body into the training_step of a trainkit.Task, and call trainkit.Trainer(...)"
    ".fit(task, loader): docs/tutorial_script.md, step 2."
)
_NOT_OF_A_LOOP = {
    "batch": (
        "find batch tries microbatches that do not fit, and the loop of {} is its own: a forward"
        " pass that runs out of memory there ends the script." + _WRITE
    ),
    "settings": (
        "find settings trains copies of the model, one for each setting, and the loop of {} computes"
        " with its own model alone." + _WRITE
    ),
}


def main(command: str, arguments: Sequence[str]) -> int:
    """Find what the first argument names, `lr|batch|workers|settings`, of a config or a script;
    return the exit code.
    """
    started = read_launcher()
    before, script = split_script(arguments)
    if "-h" in before or "--help" in before or not arguments:
        if started.is_main:
            print(help_text(command, USAGE))
        return 0
    argv, as_json = split_json(before)
    what, *rest = argv or [""]
    try:
        if what not in _OWN:
            raise ConfigError(
                f"'{what}' cannot be found.{did_you_mean(what, _OWN)} There is: {', '.join(_OWN)};"
                " as: find lr conf=mlp."
            )
        if flag := next((word for word in rest if word in ("-m", "--multirun")), None):
            raise ConfigError(f"find takes one config: leave {flag} out.")
        own, left = split_own(rest, _OWN[what])
        read, find = _FINDERS[what]
        settings = read(own)
    except ConfigError as error:
        return fail(error, started, str(error), error.exit_code)

    def work(subject: Subject, facts: dict[str, Any]) -> None:
        if subject.is_loop and what in _NOT_OF_A_LOOP:
            raise ConfigError(_NOT_OF_A_LOOP[what].format(subject.of))
        facts |= find(subject, settings) or {}

    writes = what == "lr"
    return look_at(command, left, script, _OWN[what], work, started, as_json, writes=writes)


def _read_lr(own: dict[str, str]) -> dict[str, Any]:
    early = own.get("early_stop", "4")
    threshold = None if early == "null" else _number("early_stop", early)
    if threshold is not None and threshold <= 1:
        raise ConfigError(
            f"early_stop is '{early}'; it must be above 1, since it multiplies the lowest loss, or"
            " null to sweep to the end."
        )
    return {
        "min_lr": _number("min_lr", own.get("min_lr", "1e-8")),
        "max_lr": _number("max_lr", own.get("max_lr", "1")),
        "steps": count("steps", own.get("steps", "100"), 10),
        "threshold": threshold,
    }


def _read_batch(own: dict[str, str]) -> dict[str, Any]:
    memory = None if "memory_gb" not in own else _number("memory_gb", own["memory_gb"])
    return {"memory_gb": memory, "most": count("most", own.get("most", "65536"))}


def _read_settings(own: dict[str, str]) -> dict[str, Any]:
    return {"steps": count("steps", own.get("steps", "20"))}


def _read_workers(own: dict[str, str]) -> dict[str, Any]:
    most = None if "most" not in own else count("most", own["most"], 0)
    return {"steps": count("steps", own.get("steps", "20")), "most": most}


def _number(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"{key} is '{text}'; it must be a number above 0, as 1e-3.")
    return number


def _find_lr(subject: Subject, settings: dict[str, Any]) -> Found:
    """Sweep, and print what the curve suggests. torch is imported here, after all checks."""
    lr: Any = importlib.import_module("trainkit.extensions.find.lr")
    asked = subject.requested
    curve = lr.sweep(asked.task, asked.data, asked.options, **settings)
    launcher = read_launcher()
    if not launcher.is_main:
        return None
    rates = [
        (name, rate)
        for name, rate in (("steepest", curve.suggestion()), ("valley", curve.valley()))
        if rate is not None
    ]
    suggested = [(name, rate, subject.rate_text(rate)) for name, rate in rates]
    notes = [
        f"{plural(len(curve.lrs), 'step')} at {plural(launcher.world_size, 'rank')}" + _up_to(curve)
    ]
    if curve.stopped:
        notes.append(f"The sweep ended early: {curve.stopped}.")
    if curve.factor != 1:
        notes.append(
            f"The contract of batch and rate multiplies these rates by {curve.factor:g} here"
            " (trainer.lr_scaling)."
        )
    if not suggested:
        notes.append(
            "The loss does not fall: no rate is suggested. Start lower (min_lr=...), or take more"
            " steps (steps=200)."
        )
    page = Path(subject.run_dir).absolute() / "reports" / "lr.html"
    write_lr_page(
        page,
        subject.of,
        curve.lrs,
        curve.losses,
        curve.smoothed_losses,
        suggested,
        notes,
    )
    console = console_of()
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)
    for name, rate, override in suggested:
        console.print(f"{name:<9} {rate:<8.2g} {override}", soft_wrap=True, markup=False)
    console.print(f"page      {short(page)}", soft_wrap=True, markup=False)
    return {
        "of": subject.of,
        "ranks": launcher.world_size,
        "rates": {name: rate for name, rate, _ in suggested},
        "curve": {"lr": curve.lrs, "loss": curve.losses, "smoothed": curve.smoothed_losses},
        "factor": curve.factor,
        "stopped": curve.stopped,
        "page": str(page),
    }


def _up_to(curve: Any) -> str:
    return f", from a rate of {curve.lrs[0]:.3g} to {curve.lrs[-1]:.3g}." if curve.lrs else "."


def _find_batch(subject: Subject, settings: dict[str, Any]) -> Found:
    """Try microbatches, and print a table and the largest that fits."""
    batch: Any = importlib.import_module("trainkit.extensions.find.batch")
    sizes = batch.find_batch(subject, **settings)
    if not read_launcher().is_main:
        return None
    console = console_of()
    rows = []
    for tried in sorted(sizes.tried, key=lambda one: int(one.batch_size)):
        ranks = ", ".join(map(str, tried.failed))
        rows.append(
            (
                str(tried.batch_size),
                human(tried.peak_bytes),
                f"no: rank {ranks}" if ranks else "yes",
            )
        )
    console.print(
        Grid(
            "Microbatches tried",
            (subject.batch_size_key, "peak of a rank", "fits"),
            rows,
            sentences=(2,),
        ).rich()
    )
    if sizes.largest is None:
        raise ConfigError(
            "Not one sample fits. Try trainer.activation_checkpointing=true or engine=fsdp"
            " (docs/large_models.md)."
        )
    more = (
        "; no larger one was tried (most=..., or the data has no more samples)"
        if sizes.is_limited
        else ""
    )
    console.print(
        f"largest   {sizes.largest} samples on each of {plural(sizes.ranks, 'rank')}{more}",
        soft_wrap=True,
    )
    size, accumulate = sizes.choice()
    accumulation = subject.key("accumulate_grad_batches")
    text = f"{subject.batch_size_key}={size} {accumulation}={accumulate}"
    console.print(
        f"keeps     {sizes.global_batch} samples a step: {text}", soft_wrap=True, markup=False
    )
    return {
        "of": subject.of,
        "ranks": sizes.ranks,
        "largest": sizes.largest,
        "is_limited": sizes.is_limited,
        "global_batch": sizes.global_batch,
        "choice": {"batch_size": size, "accumulate_grad_batches": accumulate},
        "tried": [dataclasses.asdict(one) for one in sizes.tried],
    }


def _find_workers(subject: Subject, settings: dict[str, Any]) -> Found:
    """Try loader workers and prefetch, and print a table and the cheapest that is fast."""
    loading: Any = importlib.import_module("trainkit.extensions.find.workers")
    asked = subject.requested
    loadings, ranks = loading.find_workers(asked.task, asked.data, asked.options, **settings)
    if not read_launcher().is_main:
        return None
    console = console_of()
    rows = [
        (
            f"{one.workers}",
            f"{one.prefetch}",
            f"{one.samples_per_s:,.0f}",
            share(one.data_share, 1.0),
        )
        for one in loadings
    ]
    title = (
        f"Loader workers of each of {plural(ranks, 'rank')}, up to"
        f" {plural(settings['steps'], 'step')} each"
    )
    console.print(Grid(title, ("workers", "prefetch", "samples/s", "waits for data"), rows).rich())
    best = loading.enough(loadings)
    settings_text = f"{subject.workers_key}={best.workers}"
    if best.prefetch > 2:  # torch's default; the shipped data has no setting for it
        settings_text += f", and prefetch_factor={best.prefetch} of the DataLoader"
    why = (
        "no setting is faster by more than a twentieth"
        if best.is_fed
        else "within a twentieth of the fastest"
    )
    console.print(f"enough    {settings_text}: {why}", soft_wrap=True, markup=False)
    return {
        "of": subject.of,
        "ranks": ranks,
        "enough": {"num_workers": best.workers, "prefetch_factor": best.prefetch},
        "tried": [dataclasses.asdict(one) for one in loadings],
    }


def _find_settings(subject: Subject, settings: dict[str, Any]) -> Found:
    """Try the wire's settings, and print a table and what is faster."""
    wire: Any = importlib.import_module("trainkit.extensions.find.wire")
    sums = wire.find_settings(subject, **settings)
    if not read_launcher().is_main:
        return None
    console = console_of()
    own = sums.tried[0]
    rows = [
        _wire_row(one, subject.engine_text(one.options), sums)
        for one in sorted(sums.tried, key=lambda one: float(one.step_s))
    ]
    title = (
        f"Settings of engine={sums.engine}: {plural(sums.ranks, 'rank')},"
        f" {human(sums.gradient_bytes)} of gradients"
    )
    console.print(
        Grid(
            title, ("setting", "step", "waits", "speed", "gradients"), rows, sentences=(0, 4)
        ).rich()
    )
    for why in sums.skipped:
        console.print(f"left out  {why}", soft_wrap=True, markup=False)
    best = sums.faster(exact=True)
    rounded = sums.faster(exact=False)
    text = "the config's own: no other gains more than 3 %"
    if best:
        text = f"{subject.engine_text(best.options)}   {own.step_s / best.step_s:.2f} times as fast"
    console.print(f"fastest   {text}", soft_wrap=True, markup=False)
    if rounded:
        times = f"{own.step_s / rounded.step_s:.2f} times as fast"
        console.print(
            f"rounded   {subject.engine_text(rounded.options)}   {times}; gradients are rounded on the way",
            soft_wrap=True,
            markup=False,
        )
    return {
        "of": subject.of,
        "engine": sums.engine,
        "ranks": sums.ranks,
        "gradient_bytes": sums.gradient_bytes,
        "fastest": dict(best.options) if best else {},
        "rounded": dict(rounded.options) if rounded else None,
        "tried": [dataclasses.asdict(one) for one in sums.tried],
        "skipped": sums.skipped,
    }


def _wire_row(one: Any, text: str, sums: Any) -> tuple[str, ...]:
    name = text or "the config's own"
    own = sums.tried[0]
    if one.refused:
        return name, "", "", "", one.refused
    exact = "exact" if one.is_exact and not sums.rounds else "rounded"
    return (
        name,
        f"{one.step_s * 1e3:.2f} ms",
        f"{one.waits_s * 1e3:.2f} ms",
        f"{own.step_s / one.step_s:.2f}",
        exact,
    )


_FINDERS = {
    "lr": (_read_lr, _find_lr),
    "batch": (_read_batch, _find_batch),
    "workers": (_read_workers, _find_workers),
    "settings": (_read_settings, _find_settings),
}
