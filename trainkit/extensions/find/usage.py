"""What `find` takes."""

from trainkit.cli.as_json import OPTION
from trainkit.cli.usage import RUN_DIR, TRUST
from trainkit.extension import Usage

USAGE = Usage(
    "lr|batch|workers|settings [...] conf=NAME [key=value ...] | SCRIPT [arguments]",
    "lr: train for some steps while the learning rate rises, print the rates that the curve of the"
    " loss suggests, and write RUN_DIR/reports/lr.html. batch: train two steps at growing"
    " microbatches, and print the largest that fits on all ranks. workers: train some steps at"
    " growing numbers of loader workers, and print the fewest that are fast. settings: try how"
    " gradients travel (fusion, cycle, groups, buckets, compression), and print what is faster."
    " Nothing else is written. A script is run up to its fit.",
    (
        ("min_lr", "float", "1e-8", "lr: the first rate"),
        ("max_lr", "float", "1", "lr: the last rate"),
        (
            "steps",
            "int",
            "100, 20",
            (
                "lr: steps of the sweep, 10 or more. workers, settings: steps measured for each,"
                " workers: at most"
            ),
        ),
        (
            "early_stop",
            "float",
            "4",
            "lr: end at this multiple of the lowest loss; null: only if a loss is not finite",
        ),
        (
            "memory_gb",
            "float",
            "the GPU's",
            "batch: memory that a rank may use, in 10^9 bytes; needed on the CPU",
        ),
        (
            "most",
            "int",
            "65536, the cores",
            "batch: no larger microbatch is tried. workers: so many at most",
        ),
        RUN_DIR,
        TRUST,
        OPTION,
    ),
    (
        "lr conf=mlp",
        "lr conf=gpt min_lr=1e-6 max_lr=0.1 steps=200",
        "batch conf=resnet18 memory_gb=4",
        "workers conf=resnet18",
        "settings conf=resnet18",
        "lr steps=200 mine.py --width 128",
    ),
    takes_config=True,
    parts=("lr", "batch", "workers", "settings"),
)
