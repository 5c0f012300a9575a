"""plan: what a run would do at any number of ranks,
worked out before it starts (docs/optimizers.md).

command.py    reads the line, and builds the run as rank 0 of simulated ranks (planned.py, simulated.py)
show.py       the plan as a value and as tables, of the rows of
plan.py       batches, steps, sizes (rates.py; traffic.py: bytes that travel; saved.py; advice.py)
fits.py       the layouts that memory_gb is compared with, the simplest first (starting.py)
layouts.py    the bytes of a rank under one, from what is
measured.py   measured: steps as a rank of each kind runs them (record.py, living.py; fsdp/widths.py)
"""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="plan",
    summary=(
        "plan: batches, steps, rates, traffic and memory of a fit at any number of ranks, without"
        " training"
    ),
    proven="each commit; memory of a GPU not yet",
    commands={
        "plan": Command(
            summary=(
                "describe what fit would do, at any number of ranks (ranks=64), without training"
            ),
            main="trainkit.extensions.plan.command.main",
            usage="trainkit.extensions.plan.usage.USAGE",
        )
    },
)
