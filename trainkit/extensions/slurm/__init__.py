"""Slurm: submits a fit as a batch job (launcher=slurm), and lists, prints and cancels jobs
(docs/slurm.md).

submit      config -> options (checked) -> script -> launcher (sbatch) -> jobs.jsonl in the run's folder
in the job  script: srun -> each task is one rank; the core's launch/slurm reads rank, world and
rendezvous there
            USR1 before the time limit -> checkpoint -> requeue: note_requeue, and the script's
            scontrol requeue
afterwards  jobs: the jobs of folders of runs, with their states from squeue or sacct
"""

from trainkit.extension import Extension

EXTENSION = Extension(
    name="slurm",
    summary=(
        "launcher=slurm submits a fit as a batch job, which is queued again and resumes; jobs lists"
        " them"
    ),
    proven=(
        "a job each commit where Slurm is installed; all of it in the full test run, on one host"
    ),
    targets=("trainkit.extensions.slurm.launcher.SlurmLauncher",),
    names={
        "trainkit.launch.slurm.launcher.SlurmLauncher": (
            "trainkit.extensions.slurm.launcher.SlurmLauncher"
        )
    },
    clusters=("trainkit.extensions.slurm.cluster.SlurmCluster",),
)
