"""What `doctor` takes."""

from trainkit.extension import Usage

USAGE = Usage(
    "[--json] [--no-allreduce]",
    "Check versions, Horovod's build, GPUs, this host's limits and network, and an allreduce of"
    " two ranks. Exit code 0 if nothing is wrong (there may be warnings), else 1.",
    (
        (
            "--json",
            "flag",
            "off",
            "for machines: a list of findings, as {area, name, value, status, why, remedy}",
        ),
        (
            "--no-allreduce",
            "flag",
            "off",
            "do not start the two ranks (saves about 10 seconds)",
        ),
    ),
    ("", "--json --no-allreduce"),
)
