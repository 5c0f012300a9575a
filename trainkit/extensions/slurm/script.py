"""The batch script of a job: srun starts a rank on each task,
and a job that was signalled is queued again.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.extensions.slurm.options import SlurmOptions
from trainkit.launch.network import SECRET
from trainkit.launch.slurm.step import LAUNCHER, REQUEUE
from trainkit.run.progress_file import FILE

SLURM = "slurm"  # the job's folder, in that of its run
_STARTS = 5  # that end at the same step: another would not help


@dataclass(frozen=True)
class JobFit:
    """What a job runs.

    Attributes:
        name: of the job.
        words: of the command, after "python -m trainkit".
        start: further words, of the job's first start, if those of later starts differ.
        resume: further words, of each start but the first.
        run_dir, folder: of the run, and in which the command is started; absolute.
        needs_secret: whether ranks sign what they send each other.
    """

    name: str
    words: Sequence[str]
    start: Sequence[str]
    resume: Sequence[str]
    run_dir: Path
    folder: Path
    needs_secret: bool = False


def directives_of(fit: JobFit, options: SlurmOptions) -> list[str]:
    """Return all of sbatch's options for a job, as its script has them: quoted."""
    folder = fit.run_dir / SLURM
    return [
        f"--job-name={shlex.quote(fit.name)}",
        *options.directives,
        "--requeue" if options.requeue else "--no-requeue",
        f"--chdir={shlex.quote(str(fit.folder))}",
        f"--output={shlex.quote(str(folder).replace('%', '%%') + '/%j.out')}",
        "--open-mode=append",
    ]


def script_of(fit: JobFit, options: SlurmOptions) -> str:
    """Return the script of a job."""
    folder = fit.run_dir / SLURM
    srun = ["srun", "--kill-on-bad-exit=1"]
    srun += [f"--cpus-per-task={options.cpus_per_task}"] if options.cpus_per_task else []
    command = _joined(
        [*srun, *options.srun_args, options.python or sys.executable, "-m", "trainkit", *fit.words]
    )
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {directive}" for directive in directives_of(fit, options)),
        (
            "# Written by trainkit. The ranks touch this file after a signal, when their checkpoint"
            " is written."
        ),
        f'export {LAUNCHER}=slurm {REQUEUE}={shlex.quote(str(folder))}/requeue-"$SLURM_JOB_ID"',
        f'rm -f "${REQUEUE}"',
    ]
    if fit.needs_secret:
        lines.append(f'export {SECRET}="$(od -An -N32 -tx1 /dev/urandom | tr -d " \\n")"')
    lines += options.setup
    if list(fit.start) == list(fit.resume):
        command += f" {_joined(fit.resume)}"
    else:
        lines += [
            f"start=({_joined(fit.start)})",
            f'[ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && start=({_joined(fit.resume)})',
        ]
        command += ' "${start[@]}"'
    lines += ["code=0", f"{command} || code=$?"]  # `set -e` of the setup does not end it here
    # nothing is lost: a rank that has started Python holds signals until it can save (hold_signals)
    if options.requeue:
        ends = " | ".join(str(128 + number) for number in (signal.SIGUSR1, signal.SIGTERM))
        lines += [
            "# Ended by a signal while Python started: as after a checkpoint.",
            f'case $code in {ends}) touch "${REQUEUE}" ;; esac',
        ]
    lines += [f'if [ -e "${REQUEUE}" ]; then', f'  rm -f "${REQUEUE}"', "  code=75"]
    lines += _requeue_lines(fit) if options.requeue else []
    return "\n".join([*lines, "fi", "exit $code", ""])


def _requeue_lines(fit: JobFit) -> list[str]:
    """Return the lines that queue a job again, unless its starts get no further: the limit may be
    shorter than a start.
    """
    progress = shlex.quote(str(fit.run_dir / FILE))
    steps = f'"${REQUEUE}.steps"'
    last = f"tail -n {_STARTS} {steps}"
    why = (
        f"[slurm] {_STARTS} starts in a row ended at the same step: the job is not queued again. If"
        " its limit is shorter than a start takes, give more time (launcher.time). Then submit it"
        " again, with resume=auto."
    )
    return [
        f"  # the step at which this start has ended, as the run's {FILE} has it",
        f"  grep -sm 1 '^ \"step\":' {progress} >> {steps} || echo none >> {steps}",
        f'  if [ "$({last} | wc -l)" -eq {_STARTS} ] && [ "$({last} | uniq | wc -l)" -eq 1 ]; then',
        f"    echo {shlex.quote(why)}",
        "    code=1",
        "  else",
        '    scontrol requeue "$SLURM_JOB_ID"',
        "  fi",
        "fi",
        "if [ $code -ne 75 ]; then",
        f"  rm -f {steps}",
    ]


def _joined(arguments: Sequence[str]) -> str:
    """Return words as the shell reads them;
    one with single quotes in double quotes, for a reader's sake.
    """
    return " ".join(
        f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)
        for word in arguments
    )
