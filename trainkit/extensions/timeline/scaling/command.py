"""scaling: runs a config at several numbers of ranks, and predicts its speed at more."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.cli import run
from trainkit.cli.guard import fail
from trainkit.cli.options import count, engine_of, split_own
from trainkit.cli.usage import help_text
from trainkit.config.roles import declared_engine
from trainkit.console import console_of, plural, short
from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.timeline.report.steps import analyse
from trainkit.extensions.timeline.scaling.model import (
    Measured,
    check_words,
    excess_words,
    fit,
    measured_grid,
    predictions_grid,
)
from trainkit.extensions.timeline.scaling.page import write_scaling_page
from trainkit.extensions.timeline.traces.merge import read_recording, recordings
from trainkit.extensions.timeline.usage import SCALING
from trainkit.launch.commands import first_error
from trainkit.launch.environment import pretend, read_launcher, without_launcher
from trainkit.launch.local import Launcher, launcher_of, run_job, start_with

if TYPE_CHECKING:
    from trainkit.config.compose import ComposedJob

_OWN = ("ranks", "steps", "gbits", "hosts")
_WARM_STEPS = 5


@dataclass(frozen=True)
class ScalingRequest:
    """The command line's request; see usage.py."""

    ranks: tuple[int, ...]
    steps: int
    gbits: tuple[float, ...]
    hosts: str


def main(command: str, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    if "-h" in arguments or "--help" in arguments:
        print(help_text(command, SCALING))
        return 0
    started = read_launcher()
    own, rest = split_own(arguments, _OWN)
    try:
        if started.world_size > 1:
            raise ConfigError(
                f"scaling starts its ranks itself: run it without {started.name}, with ranks=1,2."
            )
        asked = _read(own, rest)
    except ConfigError as error:
        return fail(error, started, str(error), error.exit_code)
    launcher = launcher_of(engine_of(rest))
    # the config is checked for the largest run
    pretend(max(asked.ranks), max(asked.ranks), launcher)
    return run.main(command, rest, lambda job: _measure(job, asked, rest, launcher), started)


def _read(own: dict[str, str], rest: Sequence[str]) -> ScalingRequest:
    if "-m" in rest or "--multirun" in rest:
        raise ConfigError("scaling takes one config: leave -m out.")
    if "ranks" not in own:
        raise ConfigError(
            "ranks is missing; it must be numbers of ranks to run, for example ranks=1,2."
        )
    ranks = tuple(sorted({count("ranks", text) for text in own["ranks"].split(",")}))
    try:
        gbits = tuple(float(text) for text in own.get("gbits", "10,25,100,400").split(","))
    except ValueError:
        gbits = (0.0,)
    if not all(0 < speed < math.inf for speed in gbits):
        raise ConfigError(
            f"gbits is '{own['gbits']}'; it must be network speeds in Gbit/s above 0, for example"
            " gbits=10,100."
        )
    return ScalingRequest(
        ranks, count("steps", own.get("steps", "20")), gbits, own.get("hosts", "")
    )


def _measure(
    job: ComposedJob, asked: ScalingRequest, overrides: Sequence[str], launcher: Launcher
) -> None:
    if declared_engine(job.config) == "single" and asked.ranks[-1] > 1:
        raise ConfigError(
            f"ranks is {asked.ranks[-1]}, but engine=single has one rank. Use engine=horovod or"
            " engine=ddp."
        )
    folder = Path(str(job.config["run_dir"])).absolute()
    notes, settings = _settings(job, asked, folder)
    console = console_of()
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)
    measured = []
    for ranks in asked.ranks:
        print(
            f"{plural(ranks, 'rank')}, {_WARM_STEPS + asked.steps} steps ...", end=" ", flush=True
        )
        started = time.monotonic()
        try:
            measured.append(
                _run(ranks, folder / f"ranks-{ranks}", asked, [*overrides, *settings], launcher)
            )
        except KeyboardInterrupt:
            print(f"\nStopped; the recordings so far are in {short(folder)}", flush=True)
            raise
        print(f"{time.monotonic() - started:.0f} s", flush=True)
    _report(job, measured, asked, folder, notes)


def _settings(job: ComposedJob, asked: ScalingRequest, folder: Path) -> tuple[list[str], list[str]]:
    """Return notes for the user, and the overrides that limit a run to the measurement."""
    trainer, notes = job.config["trainer"], []
    settings = [
        f"trainer.max_steps={_WARM_STEPS + asked.steps}",
        "trainer.max_epochs=null",
        "trainer.limit_val_batches=0",
    ]
    settings += [
        "trainer.num_sanity_val_steps=0",
        "trainer.enable_checkpointing=false",
        "trainer.enable_progress_bar=false",
    ]
    settings += [f"~logger.{name}" for name in job.config.get("logger") or {}]
    for name, value in (
        ("_target_", "trainkit.callbacks.Timeline"),
        ("start_step", _WARM_STEPS),
        ("num_steps", asked.steps),
        ("torch_profiler", "false"),
    ):
        settings.append(f"++callbacks.timeline.{name}={value}")
    settings.append(
        "++callbacks.sum_costs._target_=trainkit.extensions.timeline.scaling.allreduce_costs.AllreduceCosts"
    )
    if trainer.get("global_batch_size") is not None:
        settings += ["trainer.global_batch_size=null", "trainer.accumulate_grad_batches=1"]
        notes.append(
            "trainer.global_batch_size is ignored: each rank keeps its own batch, so more ranks"
            " process more samples."
        )
    cores, most = len(os.sched_getaffinity(0)), asked.ranks[-1]
    if not asked.hosts and "OMP_NUM_THREADS" not in os.environ:
        notes.append(
            f"On the CPU a rank computes with {max(1, cores // most)} of {cores} cores, at all"
            " numbers of ranks."
        )
    if not asked.hosts and most > cores:
        notes.append(
            f"This host has {cores} cores for {most} ranks: on the CPU they share cores, unlike on"
            " a cluster."
        )
    return notes, settings


def _run(
    ranks: int, run_dir: Path, asked: ScalingRequest, overrides: Sequence[str], launcher: Launcher
) -> Measured:
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / "output.log"
    start = start_with(launcher, ranks, engine_of(overrides))
    if asked.hosts and ranks > 1:
        start[3:3] = ["-H", asked.hosts]
    env = without_launcher(os.environ)
    env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // asked.ranks[-1])))
    code = run_job([*start, "-m", "trainkit", "fit", *overrides, f"run_dir='{run_dir}'"], log, env)
    if code != 0:
        lines = log.read_text(errors="replace").splitlines()
        shown = "".join(f"\n  {line}" for line in [*first_error(lines), *lines[-8:]])
        raise EngineError(
            f"The run of {ranks} ranks failed (exit code {code}):{shown}\nIts full output: {log}"
        )
    found = recordings(run_dir)
    if not found:
        raise EngineError(
            f"The run of {ranks} ranks ended before step {_WARM_STEPS}: the data has fewer steps."
            f" Use a longer epoch. Its full output: {log}"
        )
    costs = run_dir / "sum-costs.json"
    sums = (
        [(float(size), float(s)) for size, s in json.loads(costs.read_text())]
        if costs.is_file()
        else []
    )
    return Measured(ranks, analyse(read_recording(found[-1])), sums)


def _report(
    job: ComposedJob,
    measured: list[Measured],
    asked: ScalingRequest,
    folder: Path,
    notes: Sequence[str],
) -> None:
    console, models = console_of(), fit(measured)
    console.print()
    console.print(measured_grid(measured).rich())
    for sentence in excess_words(measured):
        console.print(sentence, soft_wrap=True, markup=False)
    if models is not None:
        console.print(check_words(models[0], measured[-1]), soft_wrap=True, markup=False)
        console.print()
        console.print(predictions_grid(models[1], asked.gbits).rich())
    else:
        console.print("Predictions need two numbers of ranks, at least one of them 2 or more.")
    page = folder / "reports" / "scaling.html"
    numbers = folder / "reports" / "scaling.json"
    write_scaling_page(page, f"conf={job.config['conf']}", measured, models, asked.gbits, notes)
    entries = [
        {"ranks": m.ranks, "step_s": m.step_s, "samples_per_s": m.samples_per_s}
        | {part: m.analysis.median(part) for part in ("data", "waiting", "communication")}
        for m in measured
    ]
    ring = None if models is None else dataclasses.asdict(models[1].ring)
    numbers.write_text(json.dumps({"measured": entries, "ring": ring}, indent=1))
    console.print(f"page     {short(page)}", soft_wrap=True)
    console.print(f"numbers  {short(numbers)}", soft_wrap=True)
