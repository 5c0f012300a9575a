"""SlurmLauncher: submits a fit as a batch job, or prints its script.

sbatch itself, and not submitit: submitit runs a pickled function, where the ranks of this job run
the same command as everywhere, and a plain script in the run's folder can be read, changed and
submitted by hand.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.config.of_run import is_own
from trainkit.errors import ConfigError
from trainkit.extensions.jobs.fits import engine_of_ranks
from trainkit.extensions.jobs.overrides import override, without
from trainkit.extensions.slurm.jobs import SubmittedJob, jobs_of, record, states_of
from trainkit.extensions.slurm.options import options_of
from trainkit.extensions.slurm.programs import error_of, partitions, run_program
from trainkit.extensions.slurm.script import SLURM, JobFit, directives_of, script_of
from trainkit.launch.job_launcher import FitConfig, JobLauncher
from trainkit.launch.shared_folder import made_for_now
from trainkit.safety.masking import masked_arguments

_SCRIPT = "job.sh"
# Reasons for which a job waits forever, as it is and as the cluster is, and the setting that each
# is about.
_NEVER = {
    "BadConstraints": "launcher.constraint",
    "PartitionConfig": "launcher.partition",
    "PartitionInactive": "launcher.partition",
    "PartitionNodeLimit": "launcher.nodes",
    "PartitionTimeLimit": "launcher.time",
}
_FIRST = ("", "PartitionConfig")  # reasons of a job that Slurm's scheduler has not looked at yet
# Several jobs of one run, errors in another file, a wait for its end: no option undoes these. The
# last is how often the job that submits was queued again, which sbatch passes on.
_NOT_OF_A_RUN = ("SBATCH_ARRAY_INX", "SBATCH_ERROR", "SBATCH_WAIT", "SLURM_RESTART_COUNT")
_ASKS = 4
_ASK_AGAIN_S = 1.0


class SlurmLauncher(JobLauncher):
    """A batch job on Slurm, its tasks are the ranks; see docs/slurm.md. Settings have sbatch's
    names.

    Args:
        nodes: number of nodes.
        ntasks_per_node: ranks on each node; null: gpus_per_node, or 1.
        gpus_per_node: 8, or with a type: a100:8.
        cpus_per_task: CPUs of each rank.
        mem: of each node, as 64G.
        time: the limit of one start, as "04:00:00"; null: the partition's.
        partition, account, qos, constraint, nodelist, exclude, mail_type, mail_user: as sbatch
        takes them.
        job_name: null: the config's name.
        signal: what all ranks receive how many seconds before the time limit; they save a
            checkpoint and end.
        requeue: whether the job is queued again after that, and after a preemption or the loss of a
            node, and resumes.
        array: refused: a job is one run.
        extra: further options of sbatch: {licenses: matlab, exclusive: true}.
        setup: lines of shell before the ranks are started: ["module load cuda"].
        srun_args: further words for srun: [--container-image=...].
        python: the interpreter on the nodes; null: the one that submits.
        dry_run: print the script, and submit nothing.

    Raises:
        ConfigError: a setting is not legal.
    """

    name = "slurm"
    several = (
        "submits one. Submit them one by one, or sweep with -m hydra/launcher=submitit_slurm, a"
        " process for each job."
    )
    starts_again = "is queued again"
    starts_once = "launcher.requeue=false"

    def __init__(
        self,
        *,
        nodes: int = 1,
        ntasks_per_node: int | None = None,
        gpus_per_node: int | str | None = None,
        cpus_per_task: int | None = None,
        mem: int | str | None = None,
        time: int | str | None = None,
        partition: str | None = None,
        account: str | None = None,
        qos: str | None = None,
        constraint: str | None = None,
        nodelist: str | None = None,
        exclude: str | None = None,
        mail_type: str | None = None,
        mail_user: str | None = None,
        job_name: str | None = None,
        signal: str = "USR1@60",
        requeue: bool = True,
        array: int | str | None = None,
        extra: dict[str, Any] | None = None,
        setup: list[str] | None = None,
        srun_args: list[str] | None = None,
        python: str | None = None,
        dry_run: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        self.options = options_of(given)
        self.job_name = job_name
        self.dry_run = dry_run

    @classmethod
    def engine_of(cls, settings: Mapping[str, Any]) -> str:
        """Return the engine that engine=auto has under srun."""
        return engine_of_ranks(
            *(settings.get(name) for name in ("nodes", "ntasks_per_node", "gpus_per_node"))
        )

    @classmethod
    def restarts(cls, settings: Mapping[str, Any]) -> bool:
        """Return whether it is queued again."""
        return bool(settings.get("requeue", True))

    def launch(self, fit: FitConfig, arguments: Sequence[str]) -> int:
        """Submit a job that runs the command; see `run`."""
        start = resume = ["resume=auto"]
        # for the first start: later ones resume from the run's own, or begin there too if the job
        # was lost before the run had one
        if (ckpt_path := fit.config.get("ckpt_path")) is not None:
            begins = override("ckpt_path", ckpt_path)
            is_here = is_own(ckpt_path, fit.run_dir)
            resume = ["ckpt_path=null" if is_here else begins, "resume=auto"]
            start = resume if fit.config.get("resume") else [begins]
        arguments = without(arguments, "ckpt_path", "resume", "launcher")
        run_dir = Path(fit.run_dir).absolute()
        job = JobFit(
            self.job_name or str(fit.config["conf"]),
            [*arguments, override("run_dir", str(run_dir))],
            start=start,
            resume=resume,
            run_dir=run_dir,
            folder=Path.cwd(),
            needs_secret=fit.engine == "horovod",
        )
        self.run(job, private=masked_arguments(arguments) != list(arguments))
        return 0

    def run(self, fit: JobFit, private: bool = False) -> SubmittedJob | None:
        """Submit a fit, and keep its script in the run's folder; or print the script, and return
        None.

        Args:
            fit: what the job runs.
            private: whether the words hold secrets, so that only their owner may read the script.

        Raises:
            ConfigError: sbatch is not installed or does not take the job, or a job of this folder
                has not ended. Nothing was submitted, and no file is left.
        """
        text = script_of(fit, self.options)
        if self.dry_run:
            print(text, end="")
            return None
        _refuse_second(fit.run_dir)
        script = fit.run_dir / SLURM / _SCRIPT
        partial = script.with_suffix(".part")
        with made_for_now(script.parent):
            try:
                partial.touch(0o600 if private else 0o644)
                partial.write_text(text)
                number = _submit(text, directives_of(fit, self.options))
                job = SubmittedJob(number, fit.run_dir, time.strftime("%Y-%m-%dT%H:%M:%S"))
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            partial.replace(script)
            record(job)
        self._say(job, script)
        return job

    def _say(self, job: SubmittedJob, script: Path) -> None:
        options = self.options
        print(
            f"[slurm] job {job.number} is submitted: {options.nodes} x {options.tasks} ranks;"
            f" script: {script}"
        )
        ends = (
            "is queued again, and resumes" if options.requeue else "ends (launcher.requeue=false)"
        )
        print(
            f"[slurm] {options.signal} before the time limit: all ranks save a checkpoint, and the"
            f" job {ends}"
        )
        print("[slurm] elastic is off: the number of ranks stays; if one is lost, the job ends")
        folder, above = (shlex.quote(str(path)) for path in (job.run_dir, job.run_dir.parent))
        print(
            f"[slurm] output: python -m trainkit jobs logs {folder}; all jobs: python -m trainkit"
            f" jobs {above}",
            flush=True,
        )
        _warn_if_it_waits_forever(job)


def _refuse_second(run_dir: Path) -> None:
    for job in jobs_of(run_dir)[-1:]:
        state = states_of([job])[job.number]
        if not state.is_over:
            raise ConfigError(
                f"run_dir is '{run_dir}', for which job {job.number} is {state.state} already: two"
                " would overwrite each other's files. Give another folder (run_dir=...), or end"
                f" it: python -m trainkit jobs cancel {shlex.quote(str(run_dir))}"
            )


def _warn_if_it_waits_forever(job: SubmittedJob) -> None:
    """Print a line if Slurm's reason says that the job cannot start as it was asked for."""
    state = states_of([job])[job.number]
    for _ in range(_ASKS - 1):
        if state.state == "PENDING" and state.reason in _FIRST:
            time.sleep(_ASK_AGAIN_S)
            state = states_of([job])[job.number]
    setting = (
        "what one job may ask for"
        if state.reason.endswith("PerJobLimit")
        else _NEVER.get(state.reason)
    )
    if state.state == "PENDING" and setting is not None:
        print(
            f"[slurm] job {job.number} cannot start: {state.reason} in partition {state.partition},"
            f" which is about {setting} (`scontrol show partition`, `sacctmgr show qos`). End it,"
            " and submit it with other settings: python -m trainkit jobs cancel"
            f" {shlex.quote(str(job.run_dir))}",
            flush=True,
        )


def _submit(script: str, directives: Sequence[str]) -> int:
    # at the command line too: SBATCH_PARTITION=... of the shell has precedence over the script
    given = [word for directive in directives for word in shlex.split(directive)]
    done = run_program("sbatch", ["--parsable", *given], script, without=_NOT_OF_A_RUN)
    number = done.stdout.strip().partition(";")[0]
    if done.returncode == 0 and number.isdecimal():
        return int(number)
    why = error_of(done)
    known = partitions() if "partition" in why.lower() else []
    hint = (
        f" Partitions here: {', '.join(known)}; choose one: launcher.partition={known[0]}"
        if known
        else ""
    )
    raise ConfigError(f"sbatch did not take the job, and nothing was submitted: {why}.{hint}")
