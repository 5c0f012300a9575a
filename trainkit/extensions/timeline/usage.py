"""What `timeline` and `scaling` take."""

from trainkit.cli.as_json import OPTION
from trainkit.extension import Usage

TIMELINE = Usage(
    "RUN_DIR [record=STEPS] [--json]",
    "Print the newest recording of a run (or one recording's folder), write"
    " RUN_DIR/reports/timeline.html and the merged file for ui.perfetto.dev.",
    (
        (
            "record",
            "int",
            "none",
            "request so many steps of the job that runs there with callbacks=timeline",
        ),
        OPTION,
    ),
    ("runs/mine", "runs/mine record=10"),
    takes_run=True,
)

SCALING = Usage(
    "ranks=N,N [...] conf=NAME [key=value ...] | SCRIPT [arguments]",
    "Run a config or a script at several numbers of ranks, each with the same batch per rank, and predict"
    " larger ones.",
    (
        ("ranks", "int,int,...", "", "numbers of ranks to run; the largest also checks the model"),
        ("steps", "int", "20", "steps measured at each, after 5 for warm-up"),
        (
            "gbits",
            "float,float,...",
            "10,25,100,400",
            "network speeds for the predictions, in Gbit/s",
        ),
        ("hosts", "HOST:SLOTS,...", "this host", "where horovodrun starts the ranks"),
        ("run_dir", "FOLDER", "runs/<conf or script>/<date_time>", "of recordings and the page"),
        OPTION,
    ),
    (
        "conf=resnet50 ranks=1,2",
        "conf=resnet50 ranks=8,16 hosts=a:8,b:8 gbits=100",
        "ranks=1,2 mine.py --width 128",
    ),
    takes_config=True,
)
