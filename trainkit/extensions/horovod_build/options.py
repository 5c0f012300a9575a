"""The words and options of `python -m trainkit horovod`."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainkit.extensions.horovod_build import pip

INSTALL = "python -m trainkit horovod install"
_PROG = "python -m trainkit horovod"

_ABOUT = f"""\
Horovod {pip.VERSION} is the last release. As built by pip, it does not compile against today's torch.
This command builds it for the torch of this environment, with trainkit's edits, and tests it."""

_INSTALL_ABOUT = f"""\
Build Horovod {pip.VERSION} for the torch of this environment, install it, and test it with two ranks.

The source comes from the package index that your pip is configured for; its SHA-256 is checked before any of it runs.
Then trainkit's edits are applied: elastic jobs on one host too, signed requests to the rendezvous server, errors in
Python where a lost connection used to kill the process. Each is a file in
trainkit/extensions/horovod_build/horovod-{pip.VERSION}.
The build takes about 2 to 10 minutes on 2 cores and happens once: the wheel is stored in $TRAINKIT_CACHE,
$XDG_CACHE_HOME/trainkit or ~/.cache/trainkit, and the next install of the same build takes seconds.
It needs a C++ compiler and make (Debian, Ubuntu: apt-get install g++ make); it installs its pip requirements itself.
With --wheelhouse nothing is built: the wheel comes from `{_PROG} wheel` on another machine."""

_WHEEL_ABOUT = f"""\
Build Horovod's wheel for other machines into a folder, from which `{INSTALL} --wheelhouse DIR` installs.

Without --python and --torch it is for the Python and torch of this environment; with one of them, an environment of its
own is made for the build, and deleted afterwards. The wheel's version names torch, MPI and CUDA, so one folder holds
wheels for all of a cluster's environments, and pip takes it by that version. It runs on machines with this machine's
C library or a newer one, and with the processor's features that it was built for: all that this one has of AVX, F16C
and FMA; HOROVOD_BUILD_ARCH_FLAGS (-mavx -mfma, or empty) sets others, HOROVOD_BUILD_CUDA_CC_LIST the GPUs (80,90).
torch with another CUDA than the index has: PIP_INDEX_URL=https://download.pytorch.org/whl/cu130."""

_CHECK_ABOUT = """\
Report the installed Horovod, what it was built for and with, and test it with an allreduce of two ranks.
Exit code 0 if all is good; else 1, with the reason and the command that repairs it."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(prog=_PROG, description=_ABOUT, formatter_class=raw)
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    install = commands.add_parser(
        "install",
        help="build, install and test Horovod",
        description=_INSTALL_ABOUT,
        formatter_class=raw,
    )
    _add_parts(install, _add_source(install))
    wheel = commands.add_parser(
        "wheel",
        help="build Horovod's wheel for other machines",
        description=_WHEEL_ABOUT,
        formatter_class=raw,
    )
    _add_target(wheel)
    _add_parts(wheel, wheel)
    check = commands.add_parser(
        "check",
        help="report what is installed and test it",
        description=_CHECK_ABOUT,
        formatter_class=raw,
    )
    check.add_argument(
        "--no-proof", action="store_true", help="do not start the two ranks (saves about 7 seconds)"
    )
    check.add_argument("--json", action="store_true", help="print the same as JSON, for machines")
    return made


def _add_source(install: argparse.ArgumentParser) -> argparse._ActionsContainer:
    """Add the sources that exclude one another, and return their group."""
    group = install.add_mutually_exclusive_group()
    group.add_argument(
        "--wheelhouse",
        metavar="DIR|URL",
        help=f"install a wheel that `{_PROG} wheel` made; build nothing",
    )
    return group


def _add_target(wheel: argparse.ArgumentParser) -> None:
    wheel.add_argument(
        "--python",
        metavar="VERSION",
        help="3.12, or the path of an interpreter (default: this one)",
    )
    wheel.add_argument(
        "--torch",
        metavar="VERSION",
        help="2.15, 2.15.0 or 2.15.0+cu130 (default: the installed one)",
    )
    wheel.add_argument(
        "--cuda", metavar="VERSION", help="13.0: build with NCCL, by the nvcc of this CUDA toolkit"
    )
    wheel.add_argument(
        "--out",
        type=Path,
        default=Path("wheelhouse"),
        metavar="DIR",
        help="its folder (default: wheelhouse)",
    )


def _add_parts(command: argparse.ArgumentParser, source: argparse._ActionsContainer) -> None:
    mpi = command.add_mutually_exclusive_group()
    mpi.add_argument(
        "--mpi",
        action="store_true",
        help="build with Open MPI or MPICH beside Gloo, for mpirun and Adasum",
    )
    mpi.add_argument(
        "--no-mpi",
        dest="mpi",
        action="store_false",
        help="the default: build without MPI, even where one is",
    )
    gpu = command.add_mutually_exclusive_group()
    gpu.add_argument(
        "--gpu",
        action="store_true",
        default=None,
        help="build with NCCL (default: if torch sees a GPU, and nvcc and NCCL are found)",
    )
    gpu.add_argument("--cpu", dest="gpu", action="store_false", help="build without NCCL")
    command.add_argument(
        "--jobs",
        type=_positive,
        metavar="N",
        help="parallel compilers (default: one per core, at most one per GiB of free memory)",
    )
    source.add_argument(
        "--source",
        type=Path,
        metavar="FILE",
        help=f"horovod-{pip.VERSION}.tar.gz on disk, for a machine without network",
    )
    command.add_argument(
        "--rebuild", action="store_true", help="build even if it is installed or in the cache"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is '{text}'; it must be a whole number, 1 or more")
    return int(text)
