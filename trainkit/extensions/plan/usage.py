"""What `plan` takes."""

from trainkit.extension import Usage

USAGE = Usage(
    "conf=NAME [ranks=N] [ranks_per_host=N] [memory_gb=N] [key=value ...]",
    "Describe what fit would do, without training: batches, steps, rates, traffic, memory, advice.",
    (
        ("ranks", "int", "those of the launcher, or 1", "ranks of the described run"),
        ("ranks_per_host", "int", "ranks, at most 8", "ranks on one host"),
        ("memory_gb", "int", "none", "memory of a GPU: which engine and settings fit in it"),
    ),
    (
        "conf=resnet50 ranks=64",
        "conf=resnet50 ranks=64 ranks_per_host=4 trainer.precision=bf16",
        "conf=gpt_124m memory_gb=16",
    ),
    takes_config=True,
)
