"""`python -m trainkit horovod`: build Horovod for the installed torch, or take a wheel of it, and
test it.

main
 |- _install
 |   |- _build              inspect, choose, build or take from the cache, install
 |   `- _take               install from a wheelhouse
 |- wheels.make              a wheel for other machines
 `- _check                  report the installed Horovod, whether it fits the installed torch, test
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.cli.as_json import facts_printed
from trainkit.cli.usage import read_in_part
from trainkit.errors import EngineError
from trainkit.extensions.horovod_build import check as build_check
from trainkit.extensions.horovod_build import patches, pip, wheelhouse
from trainkit.extensions.horovod_build import wheel as wheels
from trainkit.extensions.horovod_build.options import INSTALL, parser
from trainkit.extensions.horovod_build.probe import (
    BuildPlan,
    Machine,
    Wanted,
    choose,
    probe,
    search_path,
)
from trainkit.extensions.horovod_build.tools import Tool
from trainkit.extensions.horovod_build.wheel import (
    install_needs,
    new_log,
    print_plan,
    print_row,
    say,
    wheel_for,
    yes,
)
from trainkit.extensions.programs.commands import ended_cleanly

_NO_TORCH = "torch cannot be imported in this environment. Install it first: pip install torch"


def main(command: str, arguments: Sequence[str]) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 illegal request."""
    with read_in_part():
        given = parser().parse_args(arguments)
    work = {"install": _install, "wheel": wheels.make, "check": _check}[given.command]
    return ended_cleanly(lambda: work(given))


def _install(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    log = new_log("install")
    mpirun = _take(arguments, log) if arguments.wheelhouse else _build(arguments, log)
    _test(log, mpirun)
    say(f"Done in {time.monotonic() - started:.0f} s.")
    return 0


def _build(arguments: argparse.Namespace, log: Path) -> Tool | None:
    """Install a Horovod that is built here, unless it is there; return mpirun if it has MPI."""
    source = arguments.source.absolute() if arguments.source else None
    if source is not None:
        pip.verify(source)
    wanted = Wanted(mpi=arguments.mpi, gpu=arguments.gpu, jobs=arguments.jobs)
    machine = probe(os.environ)
    plan = choose(machine, wanted)
    print_plan(machine, plan)

    install_needs(pip.RUNTIME_NEEDS, machine, log)
    installed = build_check.look()
    if installed is not None and not arguments.rebuild and _fits(installed, machine, plan, wanted):
        say(f"Horovod {installed.version} is installed already, built for this torch.")
    else:
        if installed is not None and "mpi" in installed.parts and not plan.mpi.on:
            say("The installed Horovod has MPI; one without it takes its place (--mpi keeps it).")
        wheel = wheel_for(
            machine, plan, log=log, source=source, rebuild=arguments.rebuild, environ=os.environ
        )
        pip.install_wheel(wheel, log)
        say(f"Installed {wheel.name}.")
    return machine.mpirun if plan.mpi.on else None


def _take(arguments: argparse.Namespace, log: Path) -> Tool | None:
    """Install a Horovod from a wheelhouse, unless it is there; return mpirun if it has MPI."""
    machine = probe(os.environ)
    if machine.torch is None:
        raise EngineError(_NO_TORCH)
    version = wheelhouse.select(arguments.wheelhouse, machine, mpi=arguments.mpi, gpu=arguments.gpu)
    install_needs(pip.RUNTIME_NEEDS, machine, log)
    installed = build_check.look()
    if (
        installed is not None
        and installed.version == version
        and not arguments.rebuild
        and installed.error is None
    ):
        say(f"Horovod {version} is installed already.")
    else:
        wheelhouse.install(arguments.wheelhouse, version, log)
        say(f"Installed Horovod {version} from {arguments.wheelhouse}.")
    return machine.mpirun if arguments.mpi else None


def _fits(
    installed: build_check.Installed, machine: Machine, plan: BuildPlan, wanted: Wanted
) -> bool:
    assert machine.torch is not None
    return installed.problem(machine.torch.version) is None and installed.serves(plan, wanted)


def _check(arguments: argparse.Namespace) -> int:
    with facts_printed(arguments.json) as facts:
        return _look(arguments, facts)


def _look(arguments: argparse.Namespace, facts: dict[str, Any]) -> int:
    machine = probe(os.environ)
    if machine.torch is None:
        raise EngineError(_NO_TORCH)
    installed = build_check.look()
    if installed is None:
        raise EngineError(
            f"Horovod is not installed in this environment. Install it with: {INSTALL}"
        )
    _print_installed(installed, machine.torch.version)
    problem = installed.problem(machine.torch.version)
    if problem is not None:
        raise EngineError(
            f"Horovod {installed.version} cannot be used: {problem}. Repair it with: {INSTALL}"
        )
    proven: list[str] | None = None
    if not arguments.no_proof:
        proven = _test(new_log("check"), machine.mpirun if "mpi" in installed.parts else None)
    facts |= dataclasses.asdict(installed) | {"edits": installed.edits, "proof": proven}
    return 0


def _test(log: Path, mpirun: Tool | None) -> list[str]:
    """Test with horovodrun, and with mpirun if there is one that
    the installed Horovod works with; return what each rank of each test has printed.
    """
    printed: list[str] = []
    for starter in (None, mpirun)[: 1 if mpirun is None else 2]:
        started = time.monotonic()
        try:
            proven = build_check.prove(log, os.environ, starter)
        except EngineError as error:
            again = f"{INSTALL}{'' if mpirun is None else ' --mpi'} --rebuild"
            raise EngineError(
                f"{error}\nIf nothing else explains this, build again with: {again}"
            ) from None
        command = (
            "horovodrun -np 2 --gloo" if starter is None else f"mpirun -np 2 ({starter.version})"
        )
        say(f"Proof: {command}, {time.monotonic() - started:.0f} s")
        for line in proven:
            say(f"  {line}")
        printed += proven
    return printed


def _print_installed(installed: build_check.Installed, torch_version: str) -> None:
    say(f"Horovod {installed.version}")
    print_row(
        "built for", f"torch {installed.built_for or 'none'} (installed: torch {torch_version})"
    )
    print_row("edits", f"{installed.edits or 'none'} (this trainkit's: {patches.identity()})")
    print_row("imports", "yes" if installed.error is None else f"no: {installed.error}")
    for part in ("gloo", "mpi", "nccl"):
        print_row({"gloo": "Gloo"}.get(part, part.upper()), yes(part in installed.parts))
    print_row("Adasum", "yes" if "mpi" in installed.parts else "no  (it needs MPI)")
    launcher = Path(search_path(os.environ).split(os.pathsep)[0]) / "horovodrun"
    print_row(
        "horovodrun",
        str(launcher) if launcher.is_file() else f"{sys.executable} -m horovod.runner.launch",
    )
