"""What `experiment` takes."""

from trainkit.cli.as_json import OPTION
from trainkit.extension import Usage

USAGE = Usage(
    "A B [seeds=N] [budget=300s] [conf=NAME] [key=value ...]",
    "Compare two variants of a training, A and B: for each seed both start from the same weights,"
    " where the model is the same, and see the same samples in the same order. A and B are each a"
    " config (a.yaml), a script with its arguments ('mine.py --width 64'), or overrides of conf="
    " ('optimizer=adamw'); overrides behind them hold for both. Prints the difference of a logged"
    " value, its interval and a verdict, and writes RUN_DIR/reports/experiment.html and .json. Seeds"
    " that have run are not run again.",
    (
        ("seeds", "int", "3", "number of seeds, from 0 on; two or more give an interval"),
        ("budget", "SECONDS", "none", "as 300s, 10m, 2h: what does not fit is not run, and named"),
        ("metric", "NAME", "what a callback of A monitors", "the logged value that is compared"),
        ("mode", "min | max", "as that callback", "which value is better"),
        ("ranks", "int", "1", "ranks of each run"),
        ("run_dir", "FOLDER", "runs/experiment/<A>-<B>", "of the runs and the page"),
        OPTION,
    ),
    (
        "a.yaml b.yaml seeds=3 budget=300s",
        "optimizer=adamw optimizer=sgd conf=mlp metric=val/loss mode=min",
        "'mine.py --width 32' 'mine.py --width 64' metric=train/loss mode=min seeds=5",
    ),
)
