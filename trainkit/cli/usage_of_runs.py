"""What the commands take that look at runs and jobs:
show, status, runs, jobs (usage.py has the others).
"""

from __future__ import annotations

from trainkit.cli.as_json import OPTION
from trainkit.extension import Usage

_GOAL = (
    (
        "metric",
        "NAME",
        "what their sweep compares by, or a callback monitors",
        "the logged value, its last one, by which a run is best",
    ),
    ("mode", "min | max", "as there", "which value of the metric is best"),
)

USAGES_OF_RUNS = {
    "show": Usage(
        "RUN_DIR [RUN_DIR ...] [metric=NAME mode=min|max] [output=FILE] [--json]",
        "Print a table of runs and of the settings that differ, the best one, and the command that"
        " repeats it; and write a page: curves, rates, throughput, checkpoints.",
        (
            (
                "output",
                "FILE",
                "reports/show.html of the run, or reports/runs.html of the first",
                "the page",
            ),
            *_GOAL,
            OPTION,
        ),
        ("runs/mine", "runs/mine runs/other output=both.html"),
        takes_run=True,
    ),
    "status": Usage(
        "RUN_DIR [--watch] [--json]",
        "Tell what a run does now, or how it ended: state, ranks and hosts, step, rate, time left,"
        " checkpoints, restarts, goodput, alerts (docs/logging.md).",
        (
            ("every_s", "float", "5", "seconds between two looks, with --watch"),
            (
                "--watch",
                "flag",
                "off",
                (
                    "look again and again until the run has ended; without a terminal: a line each"
                    " time"
                ),
            ),
            (
                "--json",
                "flag",
                "off",
                "the same as JSON; with --watch an object on a line each time",
            ),
        ),
        ("runs/mine", "runs/mine --watch", "runs/mine --json"),
        takes_run=True,
    ),
    "runs": Usage(
        "[DIR] [sort=NAME] [metric=NAME mode=min|max] [--json]",
        "Print a table of the runs in and below a folder (default: runs): settings that differ,"
        " last and best values, state; the best one, and the command that repeats it.",
        (
            (
                "sort",
                "NAME | -NAME",
                "by folder",
                "a metric or a setting: best or smallest first; -NAME: largest first",
            ),
            *_GOAL,
            (
                "--json",
                "flag",
                "off",
                "the same as JSON, with the minimum and maximum of each metric",
            ),
        ),
        ("", "runs/mlp sort=val/acc", "runs/mlp metric=val/loss mode=min", "--json"),
        takes_run=True,
    ),
    "jobs": Usage(
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
    ),
}
