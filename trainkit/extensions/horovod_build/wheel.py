"""`python -m trainkit horovod wheel`, and the wheel that `install` installs.

make           here, or in an environment of another Python and torch, where this command runs again
`- wheel_for   from the cache, or built
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from trainkit.console import console_of
from trainkit.errors import ConfigError, EngineError
from trainkit.extensions.horovod_build import build, elsewhere, patches, pip
from trainkit.extensions.horovod_build.options import INSTALL
from trainkit.extensions.horovod_build.probe import (
    BuildPlan,
    Machine,
    Wanted,
    choose,
    probe,
    require_compilers,
)
from trainkit.extensions.programs.commands import cache_folder

say = functools.partial(print, flush=True)  # in order with stderr, also into a file


def make(arguments: argparse.Namespace) -> int:
    """Write a wheel for other machines into a folder; return the exit code."""
    source = arguments.source.absolute() if arguments.source else None
    if source is not None:
        pip.verify(source)
    out = arguments.out.absolute()
    environ = {**os.environ, **_toolkit(arguments.cuda)}
    log = new_log("wheel")
    if arguments.python or arguments.torch:
        torch = arguments.torch or _installed_torch()
        command = _words(arguments, source, out)
        return elsewhere.run_in(
            command, python=arguments.python, torch=torch, environ=environ, log=log, say=say
        )
    machine = probe(environ)
    gpu = True if arguments.cuda else arguments.gpu
    _require_toolkit(machine, arguments.cuda)
    plan = choose(machine, Wanted(mpi=arguments.mpi, gpu=gpu, jobs=arguments.jobs))
    print_plan(machine, plan)
    wheel = wheel_for(
        machine, plan, log=log, source=source, rebuild=arguments.rebuild, environ=environ
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = build.store(wheel, out)
    except OSError as error:
        raise ConfigError(
            f"--out is {out}, which cannot be written: {error.strerror}. Give another folder."
        ) from error
    say(
        f"Wrote {written}\nInstall it: {INSTALL} --wheelhouse"
        f" {shlex.quote(str(out))}{' --mpi' * plan.mpi.on}"
    )
    return 0


def _toolkit(cuda: str | None) -> dict[str, str]:
    """Return the variable that names CUDA's toolkit where it is usually installed,
    unless the user's names one.
    """
    home = Path(f"/usr/local/cuda-{cuda}")
    named = any(os.environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH"))
    return {"HOROVOD_CUDA_HOME": str(home)} if cuda and not named and home.is_dir() else {}


def _require_toolkit(machine: Machine, cuda: str | None) -> None:
    version = machine.nvcc.version if machine.nvcc else None
    if cuda and version and version != cuda:
        raise ConfigError(
            f"--cuda is {cuda}, but nvcc is of CUDA {version}. Set CUDA_HOME to the toolkit {cuda},"
            f" or give --cuda {version}."
        )


def _installed_torch() -> str:
    torch = probe(os.environ).torch
    if torch is None:
        raise EngineError(
            "torch is not installed here, and --torch is not given. Say which the wheel is for:"
            " --torch 2.15"
        )
    return torch.version


def _words(arguments: argparse.Namespace, source: Path | None, out: Path) -> list[str]:
    """Return this command for an environment that has the requested Python and torch."""
    flags = {
        "--mpi": arguments.mpi,
        "--gpu": arguments.gpu,
        "--cpu": arguments.gpu is False,
        "--rebuild": arguments.rebuild,
    }
    values = {"--cuda": arguments.cuda, "--jobs": arguments.jobs, "--source": source, "--out": out}
    command = [flag for flag, given in flags.items() if given]
    return [
        "horovod",
        "wheel",
        *command,
        *(str(part) for pair in values.items() if pair[1] is not None for part in pair),
    ]


def wheel_for(
    machine: Machine,
    plan: BuildPlan,
    *,
    log: Path,
    source: Path | None,
    rebuild: bool,
    environ: Mapping[str, str],
) -> Path:
    """Return the wheel of a build in the cache, where it is built if it is not there."""
    cache = cache_folder(environ)
    folder = cache / "wheels" / build.wheel_key(machine, plan, environ)
    cached = None if rebuild else build.cached_wheel(folder)
    if cached is not None:
        say(f"Found in the cache: {cached}")
        return cached
    if not rebuild and any(folder.glob("*.whl")):
        say(f"The wheel in {folder} is damaged; building again.")
    require_compilers(machine, environ)
    install_needs(pip.BUILD_NEEDS, machine, log)
    ignored = build.ignored_settings(environ)
    if ignored:
        say(f"Ignored in the build: {', '.join(ignored)} (use --mpi, --gpu or --cpu).")
    say("Building; this takes about 2 to 10 minutes on 2 cores and happens once.")
    started = time.monotonic()
    with _progress() as on_percent:
        wheel = build.build_wheel(
            machine,
            plan,
            source=source,
            cache=cache,
            log=log,
            environ=environ,
            on_percent=on_percent,
        )
    say(f"Built in {time.monotonic() - started:.0f} s: {wheel}")
    return wheel


def install_needs(needs: tuple[str, ...], machine: Machine, log: Path) -> None:
    """Install what Horovod needs and this environment lacks."""
    missing = pip.missing_needs(needs, machine)
    if missing:
        say(f"Installing Horovod's missing requirements: {', '.join(missing)}")
        pip.install_missing(missing, log)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Show percentages: a bar on a terminal, otherwise a line every ten percent."""
    console = console_of()
    if not console.is_terminal:
        yield _every_ten_percent()
        return
    columns = (
        TextColumn("  compiling"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("compiling", total=100)
        yield lambda percent: bar.update(task, completed=percent)


def _every_ten_percent() -> Callable[[int], None]:
    shown = 0

    def on_percent(percent: int) -> None:
        nonlocal shown
        if percent >= shown + 10:
            shown = percent // 10 * 10
            say(f"  compiling {shown}%")

    return on_percent


def new_log(command: str) -> Path:
    """Return the file for the output of what the command runs."""
    folder = cache_folder(os.environ) / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineError(
            f"The folder {folder} cannot be created: {error}. Set TRAINKIT_CACHE to another one."
        ) from None
    return folder / f"horovod-{command}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"


def print_plan(machine: Machine, plan: BuildPlan) -> None:
    """Print what was found and what will be built."""
    assert machine.torch is not None
    say(f"Horovod {pip.VERSION} for torch {machine.torch.version}")
    print_row("edits", f"{patches.identity()} ({len(patches.edits())} files)")
    print_row(
        "C++ compiler",
        f"{machine.compiler.path}: {machine.compiler.version}" if machine.compiler else "not found",
    )
    print_row("CMake", machine.cmake.version if machine.cmake else "not found; pip brings one")
    print_row(
        "compilers",
        f"{plan.jobs} in parallel ({machine.cores} cores, {machine.free_gib:.0f} GiB of memory"
        " free)",
    )
    print_row("Gloo", "yes  (always)")
    print_row("MPI", f"{yes(plan.mpi.on)}  ({plan.mpi.why})")
    print_row("NCCL", f"{yes(plan.gpu.on)}  ({plan.gpu.why})")


def print_row(name: str, value: str) -> None:
    """Print a name and its value."""
    say(f"  {name:<14}{value}")


def yes(on: bool) -> str:
    """Return yes or no, equally wide."""
    return "yes" if on else "no "
