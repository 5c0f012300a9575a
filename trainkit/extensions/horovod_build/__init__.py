"""Builds Horovod's last release against today's torch: finds the parts, applies the patches,
compiles, checks.

And its wheel for other machines (docs/horovod.md); README.md lists the patches.
"""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="horovod_build",
    summary=(
        "horovod install, wheel, check: Horovod's last release built for the torch that is"
        " installed"
    ),
    proven="each commit for the CPU; a build for GPUs compiles, and has not run on one yet",
    checks=("trainkit.extensions.horovod_build.checks.check",),
    commands={
        "horovod": Command(
            "install (build) Horovod for this torch, make its wheel for other machines, or"
            " check it",
            "trainkit.extensions.horovod_build.command.main",
        )
    },
)
