"""What `plan` takes."""

from trainkit.cli.as_json import OPTION
from trainkit.extension import Usage

USAGE = Usage(
    "[ranks=N] [ranks_per_host=N] [memory_gb=N] conf=NAME [key=value ...] | SCRIPT [arguments]",
    "Describe what fit would do, without training: batches, steps, rates, traffic, memory, advice. A"
    " script is run up to its fit. Exit code 1 if no engine fits in memory_gb.",
    (
        ("ranks", "int", "those of the launcher, or 1", "ranks of the described run"),
        ("ranks_per_host", "int", "ranks, at most 8", "ranks on one host"),
        ("memory_gb", "int", "none", "memory of a GPU: which engine and settings fit in it"),
        OPTION,
    ),
    (
        "conf=resnet50 ranks=64",
        "conf=resnet50 ranks=64 ranks_per_host=4 trainer.precision=bf16",
        "conf=gpt_124m memory_gb=16",
        "ranks=64 mine.py --width 128",
    ),
    takes_config=True,
)
