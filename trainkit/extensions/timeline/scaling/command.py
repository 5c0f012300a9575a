"""scaling: runs a config at several numbers of ranks, and predicts its speed at more."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.cli.as_json import split_json
from trainkit.cli.guard import fail
from trainkit.cli.options import count, engine_of
from trainkit.cli.usage import help_text
from trainkit.console import console_of, plural, short
from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.programs.commands import first_error
from trainkit.extensions.programs.local import Launcher, launcher_of, pretend, run_job, start_with
from trainkit.extensions.script.command_line import check_script, split_script
from trainkit.extensions.script.entry import look_at
from trainkit.extensions.script.own_options import refuse_launcher, split_own
from trainkit.extensions.timeline.report.steps import analyse
from trainkit.extensions.timeline.scaling.model import (
    MeasuredRanks,
    check_words,
    excess_words,
    fit,
    measured_grid,
    predictions_grid,
)
from trainkit.extensions.timeline.scaling.page import write_scaling_page
from trainkit.extensions.timeline.traces.merge import read_recording, recordings
from trainkit.extensions.timeline.usage import SCALING
from trainkit.launch.environment import read_launcher, without_launcher

if TYPE_CHECKING:
    from trainkit.extensions.script.subject import Subject

_OWN = ("ranks", "steps", "gbits", "hosts")
_WARM_STEPS = 5
_SUM_COSTS = "trainkit.extensions.timeline.scaling.allreduce_costs.AllreduceCosts"


@dataclass(frozen=True)
class ScalingRequest:
    """The command line's request; see usage.py."""

    ranks: tuple[int, ...]
    steps: int
    gbits: tuple[float, ...]
    hosts: str


def main(command: str, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    before, script = split_script(arguments)
    if "-h" in before or "--help" in before:
        print(help_text(command, SCALING))
        return 0
    started = read_launcher()
    argv, as_json = split_json(before)
    own, left = split_own(argv, _OWN)
    try:
        refuse_launcher(command, started, "ranks=1,2")
        if script is not None:
            of_script = (*_OWN, "run_dir")
            needed = "" if "ranks" in own else "ranks"
            check_script(command, script, split_own(left, ["run_dir"])[1], of_script, needed)
        asked = _read(own, left)
    except ConfigError as error:
        return fail(error, started, str(error), error.exit_code)
    launcher = launcher_of(engine_of(left))
    most = max(asked.ranks)

    def work(subject: Subject, facts: dict[str, Any]) -> None:
        chosen = launcher if script is None else launcher_of(subject.engine_name)
        _measure(subject, asked, chosen, facts)

    # the fit is checked for the largest run
    return look_at(
        command,
        left,
        script,
        _OWN,
        work,
        started,
        as_json,
        lambda: pretend(most, most, launcher),
        writes=True,
    )


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
    subject: Subject, asked: ScalingRequest, launcher: Launcher, facts: dict[str, Any]
) -> None:
    if subject.engine_name == "single" and asked.ranks[-1] > 1:
        raise ConfigError(
            f"ranks is {asked.ranks[-1]}, but engine=single has one rank. Use engine=horovod or"
            " engine=ddp."
        )
    if asked.hosts and launcher == "torchrun":
        raise ConfigError(
            f"hosts is '{asked.hosts}', and torchrun starts these ranks, all on this host"
            f" (engine={subject.engine_name}; auto takes Horovod if it is installed). Leave hosts"
            " out, or use engine=horovod."
        )
    folder = Path(subject.run_dir).absolute()
    notes, settings = _settings(subject, asked)
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
            measured.append(_run(subject, ranks, folder, asked, settings, launcher))
        except KeyboardInterrupt:
            print(f"\nStopped; the recordings so far are in {short(folder)}", flush=True)
            raise
        print(f"{time.monotonic() - started:.0f} s", flush=True)
    _report(subject, measured, asked, folder, notes, facts)


def _settings(subject: Subject, asked: ScalingRequest) -> tuple[list[str], dict[str, Any]]:
    """Return notes for the user, and the Trainer's settings that limit a run to the measurement."""
    notes = []
    settings: dict[str, Any] = {
        "max_steps": _WARM_STEPS + asked.steps,
        "max_epochs": None,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
    }
    if subject.global_batch_size is not None:
        settings |= {"global_batch_size": None, "accumulate_grad_batches": 1}
        notes.append(
            f"{subject.key('global_batch_size')} is ignored: each rank keeps its own batch, so more"
            " ranks process more samples."
        )
    cores = len(os.sched_getaffinity(0))
    most = _most_on_a_host(asked)
    if "OMP_NUM_THREADS" not in os.environ:
        notes.append(
            f"On the CPU a rank computes with {_threads(asked)} of {cores} cores, at all numbers of"
            " ranks."
        )
    if most > cores:
        notes.append(
            f"This host has {cores} cores for {most} ranks: on the CPU they share cores, unlike on"
            " a cluster."
        )
    return notes, settings


def _most_on_a_host(asked: ScalingRequest) -> int:
    """Return the ranks of a host in the largest run."""
    slots = [part.rpartition(":")[2] for part in asked.hosts.split(",")]
    most = max((int(text) for text in slots if text.isdecimal()), default=asked.ranks[-1])
    return min(most, asked.ranks[-1])


def _threads(asked: ScalingRequest) -> int:
    """Return the threads of a rank on the CPU, on hosts like this one."""
    return max(1, len(os.sched_getaffinity(0)) // _most_on_a_host(asked))


def _run(
    subject: Subject,
    ranks: int,
    folder: Path,
    asked: ScalingRequest,
    settings: dict[str, Any],
    launcher: Launcher,
) -> MeasuredRanks:
    run_dir = folder / f"ranks-{ranks}"
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / "output.log"
    timeline = {"start_step": _WARM_STEPS, "num_steps": asked.steps, "torch_profiler": False}
    callbacks = {
        "timeline": {"_target_": "trainkit.callbacks.Timeline", **timeline},
        "sum_costs": {"_target_": _SUM_COSTS},
    }
    module: Any = importlib.import_module("trainkit.extensions.script.changes")
    changes = module.Changes(str(run_dir), settings, callbacks, loggers="none")
    start = start_with(launcher, ranks, subject.engine_name)
    if asked.hosts and ranks > 1:
        start[3:3] = ["-H", asked.hosts]
    env = without_launcher(os.environ)
    env.setdefault("OMP_NUM_THREADS", str(_threads(asked)))
    code = run_job([*start, *subject.line(changes, folder, f"ranks-{ranks}")], log, env)
    if code != 0:
        lines = log.read_text(errors="replace").splitlines()
        shown = "".join(f"\n  {line}" for line in [*first_error(lines), *lines[-8:]])
        raise EngineError(
            f"The run of {ranks} ranks failed (exit code {code}):{shown}\nIts full output: {log}"
        )
    there = recordings(run_dir)
    if not there:
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
    return MeasuredRanks(ranks, analyse(read_recording(there[-1])), sums)


def _report(
    subject: Subject,
    measured: list[MeasuredRanks],
    asked: ScalingRequest,
    folder: Path,
    notes: Sequence[str],
    facts: dict[str, Any],
) -> None:
    console = console_of()
    models = fit(measured)
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
    write_scaling_page(page, subject.of, measured, models, asked.gbits, notes)
    entries = [
        {"ranks": m.ranks, "step_s": m.step_s, "samples_per_s": m.samples_per_s}
        | {part: m.analysis.median(part) for part in ("data", "waiting", "communication")}
        for m in measured
    ]
    ring = None if models is None else dataclasses.asdict(models[1].ring)
    numbers.write_text(json.dumps({"measured": entries, "ring": ring}, indent=1))
    facts |= {"of": subject.of, "measured": entries, "ring": ring, "notes": list(notes)}
    facts |= {"page": str(page)}
    console.print(f"page     {short(page)}", soft_wrap=True)
    console.print(f"numbers  {short(numbers)}", soft_wrap=True)
