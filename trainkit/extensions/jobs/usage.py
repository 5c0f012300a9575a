"""What `jobs` takes."""

from trainkit.extension import Usage

USAGE = Usage(
    "[DIR] [--json] | logs JOB|RUN_DIR [lines=N] | cancel JOB|RUN_DIR",
    "List the jobs with their states: on Slurm those of runs in and below a folder (default:"
    " runs), on Kubernetes those whose manifest is in kubernetes/, on Ray those of the cluster"
    " that RAY_API_SERVER_ADDRESS or RAY_ADDRESS names. Print a job's output; end a job, with a"
    " checkpoint if it trains.",
    (
        ("lines", "int", "all", "logs: the last lines alone"),
        ("--json", "flag", "off", "the list for machines"),
    ),
    ("", "--json", "logs runs/mine lines=20", "cancel 1234", "logs resnet50"),
    takes_run=True,
)
