"""jobs: those on Slurm, Kubernetes and Ray, as the extensions of these clusters know them."""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="jobs",
    summary="jobs: the list of the jobs on Slurm, Kubernetes and Ray, their output, their end",
    proven="each commit, with a real Slurm and Ray; Kubernetes by its API's answers",
    commands={
        "jobs": Command(
            summary=(
                "list the jobs on Slurm, Kubernetes and Ray, print their output, cancel them (jobs"
                " logs JOB, jobs cancel JOB)"
            ),
            main="trainkit.extensions.jobs.command.main",
            usage="trainkit.extensions.jobs.usage.USAGE",
        )
    },
)
