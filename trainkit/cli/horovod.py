"""`python -m trainkit horovod install` and `... check`: build Horovod for the installed torch, and test it.

main
 |- _install     inspect, choose, build or take from the cache, install, test
 `- _check       report the installed Horovod, whether it fits the installed torch, test
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from trainkit.cli.guard import ended_cleanly
from trainkit.errors import EngineError
from trainkit.horovod_build import build, patches, pip
from trainkit.horovod_build import check as build_check
from trainkit.horovod_build.probe import Machine, Plan, Wanted, choose, probe, require_compilers, search_path
from trainkit.horovod_build.tools import Tool

_INSTALL_COMMAND = "python -m trainkit horovod install"
_PROG = "python -m trainkit horovod"

_say = functools.partial(print, flush=True)  # in order with stderr, also into a file

_ABOUT = f"""\
Horovod {pip.VERSION} is the last release. As built by pip, it does not compile against today's torch.
This command builds it for the torch of this environment, with trainkit's edits, and tests it."""

_INSTALL_ABOUT = f"""\
Build Horovod {pip.VERSION} for the torch of this environment, install it, and test it with two ranks.

The source comes from the package index that your pip is configured for; its SHA-256 is checked before any of it runs.
Then trainkit's edits are applied: elastic jobs on one host too, signed requests to the rendezvous server, errors in
Python where a lost connection used to kill the process. Each is a file in trainkit/horovod_build/horovod-{pip.VERSION}.
The build takes about 2 to 10 minutes on 2 cores and happens once: the wheel is stored in $TRAINKIT_CACHE,
$XDG_CACHE_HOME/trainkit or ~/.cache/trainkit, and the next install of the same build takes seconds.
It needs a C++ compiler and make (Debian, Ubuntu: apt-get install g++ make); it installs its pip requirements itself."""

_CHECK_ABOUT = """\
Report the installed Horovod, what it was built for and with, and test it with an allreduce of two ranks.
Exit code 0 if all is good; else 1, with the reason and the command that repairs it."""


def main(argv: list[str]) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 illegal request."""
    arguments = _parser().parse_args(argv)
    return ended_cleanly(lambda: _install(arguments) if arguments.command == "install" else _check(arguments))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=_PROG, description=_ABOUT, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    install = commands.add_parser(
        "install", help="build, install and test Horovod", description=_INSTALL_ABOUT, formatter_class=raw
    )
    mpi = install.add_mutually_exclusive_group()
    mpi.add_argument("--mpi", action="store_true", help="build with Open MPI or MPICH beside Gloo, for mpirun and Adasum")
    mpi.add_argument("--no-mpi", dest="mpi", action="store_false", help="the default: build without MPI, even where one is")
    gpu = install.add_mutually_exclusive_group()
    gpu.add_argument(
        "--gpu",
        action="store_true",
        default=None,
        help="build with NCCL (default: if torch sees a GPU, and nvcc and NCCL are found)",
    )
    gpu.add_argument("--cpu", dest="gpu", action="store_false", help="build without NCCL")
    install.add_argument(
        "--jobs",
        type=_positive,
        metavar="N",
        help="parallel compilers (default: one per core, at most one per GiB of free memory)",
    )
    install.add_argument(
        "--source",
        type=Path,
        metavar="FILE",
        help=f"horovod-{pip.VERSION}.tar.gz on disk, for a machine without network",
    )
    install.add_argument("--rebuild", action="store_true", help="build even if it is installed or in the cache")

    check = commands.add_parser(
        "check", help="report what is installed and test it", description=_CHECK_ABOUT, formatter_class=raw
    )
    check.add_argument("--no-proof", action="store_true", help="do not start the two ranks (saves about 7 seconds)")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is '{text}'; it must be a whole number, 1 or more")
    return int(text)


def _install(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    source = arguments.source.absolute() if arguments.source else None
    if source is not None:
        pip.verify(source)
    wanted = Wanted(mpi=arguments.mpi, gpu=arguments.gpu, jobs=arguments.jobs)
    machine = probe(os.environ)
    plan = choose(machine, wanted)
    log = _new_log("install")
    _print_plan(machine, plan)

    _install_needs(pip.RUNTIME_NEEDS, machine, log)
    installed = build_check.look()
    if installed is not None and not arguments.rebuild and _fits(installed, machine, plan, wanted):
        _say(f"Horovod {installed.version} is installed already, built for this torch.")
    else:
        if installed is not None and "mpi" in installed.parts and not plan.mpi.on:
            _say("The installed Horovod has MPI; one without it takes its place (--mpi keeps it).")
        wheel = _wheel(machine, plan, log=log, source=source, rebuild=arguments.rebuild)
        pip.install_wheel(wheel, log)
        _say(f"Installed {wheel.name}.")
    _test(log, machine.mpirun if plan.mpi.on else None)
    _say(f"Done in {time.monotonic() - started:.0f} s.")
    return 0


def _fits(installed: build_check.Installed, machine: Machine, plan: Plan, wanted: Wanted) -> bool:
    assert machine.torch is not None
    return installed.problem(machine.torch.version) is None and installed.serves(plan, wanted)


def _wheel(machine: Machine, plan: Plan, *, log: Path, source: Path | None, rebuild: bool) -> Path:
    cache = build.cache_folder(os.environ)
    folder = cache / "wheels" / build.wheel_key(machine, plan, os.environ)
    found = None if rebuild else build.cached_wheel(folder)
    if found is not None:
        _say(f"Found in the cache: {found}")
        return found
    if not rebuild and any(folder.glob("*.whl")):
        _say(f"The wheel in {folder} is damaged; building again.")
    require_compilers(machine, os.environ)
    _install_needs(pip.BUILD_NEEDS, machine, log)
    ignored = build.ignored_settings(os.environ)
    if ignored:
        _say(f"Ignored in the build: {', '.join(ignored)} (use --mpi, --gpu or --cpu).")
    _say("Building; this takes about 2 to 10 minutes on 2 cores and happens once.")
    started = time.monotonic()
    with _progress() as on_percent:
        wheel = build.build_wheel(machine, plan, source=source, cache=cache, log=log, environ=os.environ, on_percent=on_percent)
    _say(f"Built in {time.monotonic() - started:.0f} s: {wheel}")
    return wheel


def _install_needs(needs: tuple[str, ...], machine: Machine, log: Path) -> None:
    missing = pip.missing_needs(needs, machine)
    if missing:
        _say(f"Installing Horovod's missing requirements: {', '.join(missing)}")
        pip.install_missing(missing, log)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Show percentages: a bar on a terminal, otherwise a line every ten percent."""
    console = Console()
    if not console.is_terminal:
        yield _every_ten_percent()
        return
    columns = (TextColumn("  compiling"), BarColumn(), TextColumn("{task.percentage:3.0f}%"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("compiling", total=100)
        yield lambda percent: bar.update(task, completed=percent)


def _every_ten_percent() -> Callable[[int], None]:
    shown = 0

    def on_percent(percent: int) -> None:
        nonlocal shown
        if percent >= shown + 10:
            shown = percent // 10 * 10
            _say(f"  compiling {shown}%")

    return on_percent


def _check(arguments: argparse.Namespace) -> int:
    machine = probe(os.environ)
    if machine.torch is None:
        raise EngineError("torch cannot be imported in this environment. Install it first: pip install torch")
    installed = build_check.look()
    if installed is None:
        raise EngineError(f"Horovod is not installed in this environment. Install it with: {_INSTALL_COMMAND}")
    _print_installed(installed, machine.torch.version)
    problem = installed.problem(machine.torch.version)
    if problem is not None:
        raise EngineError(f"Horovod {installed.version} cannot be used: {problem}. Repair it with: {_INSTALL_COMMAND}")
    if not arguments.no_proof:
        _test(_new_log("check"), machine.mpirun if "mpi" in installed.parts else None)
    return 0


def _test(log: Path, mpirun: Tool | None) -> None:
    """Test with horovodrun, and with mpirun if there is one that the installed Horovod works with."""
    for starter in (None, mpirun)[: 1 if mpirun is None else 2]:
        started = time.monotonic()
        try:
            proven = build_check.prove(log, os.environ, starter)
        except EngineError as error:
            again = f"{_INSTALL_COMMAND}{'' if mpirun is None else ' --mpi'} --rebuild"
            raise EngineError(f"{error}\nIf nothing else explains this, build again with: {again}") from None
        command = "horovodrun -np 2 --gloo" if starter is None else f"mpirun -np 2 ({starter.version})"
        _say(f"Proof: {command}, {time.monotonic() - started:.0f} s")
        for line in proven:
            _say(f"  {line}")


def _new_log(command: str) -> Path:
    folder = build.cache_folder(os.environ) / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineError(f"The folder {folder} cannot be created: {error}. Set TRAINKIT_CACHE to another one.") from None
    return folder / f"horovod-{command}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"


def _print_plan(machine: Machine, plan: Plan) -> None:
    assert machine.torch is not None
    _say(f"Horovod {pip.VERSION} for torch {machine.torch.version}")
    _print_row("edits", f"{patches.identity()} ({len(patches.edits())} files)")
    _print_row("C++ compiler", f"{machine.compiler.path}: {machine.compiler.version}" if machine.compiler else "not found")
    _print_row("CMake", machine.cmake.version if machine.cmake else "not found; pip brings one")
    _print_row("compilers", f"{plan.jobs} in parallel ({machine.cores} cores, {machine.free_gib:.0f} GiB of memory free)")
    _print_row("Gloo", "yes  (always)")
    _print_row("MPI", f"{_yes(plan.mpi.on)}  ({plan.mpi.why})")
    _print_row("NCCL", f"{_yes(plan.gpu.on)}  ({plan.gpu.why})")


def _print_installed(installed: build_check.Installed, torch_version: str) -> None:
    _say(f"Horovod {installed.version}")
    _print_row("built for", f"torch {installed.built_for or 'none'} (installed: torch {torch_version})")
    _print_row("edits", f"{installed.edits or 'none'} (this trainkit's: {patches.identity()})")
    _print_row("imports", "yes" if installed.error is None else f"no: {installed.error}")
    for part in ("gloo", "mpi", "nccl"):
        _print_row({"gloo": "Gloo"}.get(part, part.upper()), _yes(part in installed.parts))
    _print_row("Adasum", "yes" if "mpi" in installed.parts else "no  (it needs MPI)")
    launcher = Path(search_path(os.environ).split(os.pathsep)[0]) / "horovodrun"
    _print_row("horovodrun", str(launcher) if launcher.is_file() else f"{sys.executable} -m horovod.runner.launch")


def _print_row(name: str, value: str) -> None:
    _say(f"  {name:<14}{value}")


def _yes(on: bool) -> str:
    return "yes" if on else "no "
