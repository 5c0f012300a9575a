"""doctor: checks of this machine and its software, each with the fault and its remedy. Imports no
torch: a new Python process does.

command.py    `python -m trainkit doctor`, with the checks of other extensions
software.py   Python, torch, torchvision, trainkit's own dependencies
gpus.py       GPUs, driver, NCCL
host.py       cores, memory, shared memory, limits, disk, loader workers
network.py    interfaces, the host's own name, environment variables
sums.py       a real allreduce of two ranks, with its bandwidth
"""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="doctor",
    summary="doctor: this machine's set-up, its faults and their fixes",
    proven="each commit; on GPUs by a pretended driver",
    commands={
        "doctor": Command(
            "report this machine's set-up, its faults and their fixes (--json)",
            "trainkit.extensions.doctor.command.main",
            "trainkit.extensions.doctor.usage.USAGE",
        )
    },
)
