"""What `show`, `status`, `runs` and `data check` take."""

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


SHOW = Usage(
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
)

STATUS = Usage(
    "RUN_DIR [--watch] [--json]",
    "Tell what a run does now, or how it ended: state, ranks and hosts, step, rate, time left,"
    " checkpoints, restarts, goodput, alerts (docs/logging.md).",
    (
        ("every_s", "float", "5", "seconds between two looks, with --watch"),
        (
            "--watch",
            "flag",
            "off",
            ("look again and again until the run has ended; without a terminal: a line each time"),
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
)

RUNS = Usage(
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
)

DATA_CHECK = Usage(
    "conf=NAME [stage=STAGE] [workers=N] [key=value ...]",
    "Read every sample once, with the transforms of the first epoch, and list those that raise,"
    " with error and file. Exit code 1 if there are any.",
    (
        ("stage", "fit | test | predict", "fit", "which data; fit: training and validation"),
        ("workers", "int", "one for each core", "processes that read"),
        OPTION,
    ),
    (
        "conf=resnet50",
        "conf=resnet50 data=imagefolder data.root=/data/imagenet workers=8",
    ),
    takes_config=True,
)
