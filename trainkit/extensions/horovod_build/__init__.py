"""Horovod's last release, built for today's torch, and its wheel for other machines (docs/horovod.md)."""

from trainkit.extension import Command, Extension

EXTENSION = Extension(
    name="horovod_build",
    summary="horovod install, wheel, check: Horovod's last release built for the torch that is installed",
    proven="each commit for the CPU; a build for GPUs compiles, and has not run on one yet",
    commands={
        "horovod": Command(
            "install (build) Horovod for this torch, make its wheel for other machines, or check it",
            "trainkit.cli.horovod.main",
        )
    },
)
