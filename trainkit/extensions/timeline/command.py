"""timeline: prints a recording as a table and writes it as a page;
or requests a recording from a running job.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.cli.as_json import facts_printed, split_json
from trainkit.cli.usage import help_text
from trainkit.console import console_of, short
from trainkit.errors import ConfigError, TrainkitError
from trainkit.extensions.timeline.report.advice import advise
from trainkit.extensions.timeline.report.page import write_timeline_page
from trainkit.extensions.timeline.report.steps import analyse
from trainkit.extensions.timeline.report.text import grids, in_words
from trainkit.extensions.timeline.traces.merge import (
    TraceError,
    read_recording,
    recordings,
    write_whole,
)
from trainkit.extensions.timeline.traces.pieces import FOLDER, OWN, PATIENCE_S, REQUEST
from trainkit.extensions.timeline.usage import TIMELINE
from trainkit.run.lock import LOCK


def main(command: str, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    arguments, as_json = split_json(arguments)
    if not arguments or any(argument in ("-h", "--help") for argument in arguments):
        print(help_text(command, TIMELINE))
        return 0 if arguments else 2
    try:
        options = dict(a.split("=", 1) for a in arguments[1:] if "=" in a)
        if len(options) != len(arguments) - 1 or options.keys() - {"record"}:
            raise ConfigError(
                f"{' '.join(arguments[1:])} is not understood: after RUN_DIR only record=STEPS may"
                " follow."
            )
        folder = Path(arguments[0]).absolute()
        if not folder.is_dir():
            raise ConfigError(
                f"There is no folder {short(folder)}. Give a run's folder, for example"
                " runs/resnet50/<time>."
            )
        with facts_printed(as_json) as facts:
            if "record" in options:
                facts |= {"folders": _ask(folder, options["record"])}
            else:
                facts |= _show(folder)
    except TrainkitError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _show(folder: Path) -> dict[str, Any]:
    if any(folder.glob(OWN.format("*"))):
        recording = folder
        run_dir = folder.parent.parent
    else:
        there = recordings(folder)
        if not there:
            raise TraceError(
                f"{short(folder)} has no recording in {FOLDER}/. Train with callbacks=timeline, or"
                f" record from a job that runs there: python -m trainkit timeline {short(folder)}"
                " record=10"
            )
        recording = there[-1]
        run_dir = folder
    ranks = read_recording(recording)
    analysis = analyse(ranks)
    advice = advise(analysis)
    console = console_of()
    for sentence in in_words(analysis):
        console.print(sentence, soft_wrap=True, markup=False)
    for grid in grids(analysis, advice):
        console.print()
        console.print(grid.rich())
    console.print()
    page = run_dir / "reports" / "timeline.html"
    trace = None
    try:
        write_timeline_page(page, short(recording), ranks, analysis, advice)
        console.print(f"page   {short(page)}", soft_wrap=True)
        trace = write_whole(recording)
        where = f"{short(trace)}  (open it in ui.perfetto.dev or chrome://tracing)"
    except OSError as error:  # another user's run, a disk that is full
        where = f"not written into {short(run_dir)}: {error.strerror}. Copy the folder, and give the copy"
    console.print(f"trace  {where}", soft_wrap=True)
    return {
        "recording": str(recording),
        "ranks": len(ranks),
        "steps": list(analysis.numbers),
        "step_s": analysis.step_s,
        "samples_per_s": analysis.samples_per_s,
        "findings": in_words(analysis),
        "advice": [dataclasses.asdict(each) for each in advice],
        "page": str(page) if page.is_file() else None,
        "trace": None if trace is None else str(trace),
    }


def _ask(run_dir: Path, steps: str) -> list[str]:
    if not steps.isdecimal() or int(steps) < 1:
        raise ConfigError(f"record is '{steps}'; it must be a number of steps, 1 or more.")
    lock = run_dir / LOCK
    if not lock.is_file() or not lock.read_text().strip():  # a running fit has written its lock
        raise ConfigError(f"No job trains in {short(run_dir)}. Start one with callbacks=timeline.")
    request = run_dir / FOLDER / REQUEST
    before = set(recordings(run_dir))
    request.parent.mkdir(exist_ok=True)
    request.write_text(steps)
    print(f"Requested {steps} steps from the job in {short(run_dir)} ...", flush=True)
    until = time.monotonic() + PATIENCE_S
    while request.exists():
        if time.monotonic() > until:
            request.unlink(missing_ok=True)
            raise ConfigError(
                f"No answer within {PATIENCE_S:.0f} s: no job trains in {short(run_dir)} with"
                " callbacks=timeline, or it is in a long validation."
            )
        time.sleep(0.1)
    new = [str(folder) for folder in recordings(run_dir) if folder not in before]
    print(
        f"The job records{f' into {short(new[-1])}' if new else ''}. Then: python -m trainkit"
        f" timeline {short(run_dir)}"
    )
    return new
