"""`python -m trainkit deepspeed check`: what of DeepSpeed runs here; builds the parts that it needs
compiled.

main
 `- _check
     |- _build       each part that is missing and can be built, without leaving a lock
     `- _prove       two ranks try each stage and offload
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.cli.as_json import facts_printed
from trainkit.cli.usage import read_in_part
from trainkit.errors import EngineError
from trainkit.extensions.deepspeed.extensions import PARTS, building, choose_folder, is_built
from trainkit.extensions.programs.commands import cache_folder, ended_cleanly, run
from trainkit.extensions.programs.local import start_with

_INSTALL = "DS_BUILD_OPS=0 pip install deepspeed (or 'trainkit[deepspeed]')"
_TIMEOUT_S = 600.0
_LINE_EVERY_S = 15.0

_ABOUT = f"""\
Report the installed DeepSpeed, build the parts that it needs compiled, and try each stage and offload with two ranks.

Install it with: {_INSTALL}.
Compiled parts are stored in $TORCH_EXTENSIONS_DIR, or in $TRAINKIT_CACHE, $XDG_CACHE_HOME/trainkit or ~/.cache/trainkit, by
version of DeepSpeed and torch: they are built once. A killed build leaves no lock that a later start would wait for.
Exit code 0 if all that is tried runs; else 1, with the reason."""

_say = functools.partial(print, flush=True)  # in order with stderr, also into a file


def main(command: str, arguments: Sequence[str]) -> int:
    """Run the command and return its exit code: 0 done, 1 failed, 2 illegal request."""
    with read_in_part():
        given = _parser().parse_args(arguments)
    return ended_cleanly(lambda: _check(given))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m trainkit deepspeed", formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check", help="report, build and try it", description=_ABOUT, formatter_class=raw
    )
    check.add_argument("--no-build", action="store_true", help="compile nothing")
    check.add_argument(
        "--no-proof",
        action="store_true",
        help="do not start the two ranks (saves about 30 seconds)",
    )
    check.add_argument(
        "--all",
        action="store_true",
        help="build cpu_adam too (minutes): for a Task that uses DeepSpeedCPUAdam",
    )
    check.add_argument("--json", action="store_true", help="print the same as JSON, for machines")
    return parser


def _check(arguments: argparse.Namespace) -> int:
    with facts_printed(arguments.json) as facts:
        return _look(arguments, facts)


def _look(arguments: argparse.Namespace, facts: dict[str, Any]) -> int:
    if importlib.util.find_spec("deepspeed") is None:
        raise EngineError(
            f"DeepSpeed is not installed in this environment. Install it with: {_INSTALL}"
        )
    folder = choose_folder(os.environ)
    log = (
        cache_folder(os.environ)
        / "logs"
        / f"deepspeed-check-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    )
    about = _about(log)
    _say(f"DeepSpeed {about['version']}")
    _row("computes on", about["device"])
    _row("compiled in", str(folder))
    for part, purpose in PARTS.items():
        wanted = not arguments.no_build and (part != "cpu_adam" or arguments.all)
        state = _state(folder, part, about["can_build"], wanted, log)
        facts.setdefault("parts", {})[part] = state
        _row(part, f"{state}  ({purpose})")
    facts |= {"version": about["version"], "device": about["device"]}
    facts["proof"] = None if arguments.no_proof else _prove(log)
    return 0


def _about(log: Path) -> dict[str, Any]:
    """Ask a process that loads DeepSpeed."""
    lines = run(
        [sys.executable, "-m", "trainkit.extensions.deepspeed.parts"],
        what="Loading DeepSpeed",
        log=log,
        timeout_s=_TIMEOUT_S,
    )
    about: dict[str, Any] = next(
        json.loads(line) for line in reversed(lines) if line.startswith("{")
    )
    return about


def _state(folder: Path, part: str, can_build: dict[str, bool], wanted: bool, log: Path) -> str:
    """Return the state of a part in words, after building it if it is wanted and missing."""
    if is_built(folder, part):
        return "built"
    if not can_build[part]:
        needs = (
            ": libaio and its headers are missing (Debian, Ubuntu: apt-get install libaio-dev)"
            * (part == "async_io")
        )
        return f"cannot be built here{needs}"
    if not wanted or (part == "pin_memory" and not can_build["async_io"]):
        return "not built"
    started = time.monotonic()
    _say(f"  building {part}; this may take minutes, and happens once")
    with building(folder, part):
        command = [sys.executable, "-m", "trainkit.extensions.deepspeed.parts", part]
        run(command, what=f"Building {part}", log=log, on_line=_Every(started))
    return f"built in {time.monotonic() - started:.0f} s"


class _Every:
    """Prints now and then that a build is under way, as it prints lines itself.

    Args:
        started: when it began.
    """

    def __init__(self, started: float) -> None:
        self._started = self._last = started

    def __call__(self, line: str) -> None:
        """Take a line of the build."""
        now = time.monotonic()
        if now - self._last >= _LINE_EVERY_S:
            self._last = now
            _say(f"  {now - self._started:.0f} s")


def _prove(log: Path) -> list[dict[str, Any]]:
    started = time.monotonic()
    command = [*start_with("torchrun", 2), "-m", "trainkit.extensions.deepspeed.proof"]
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    lines = run(command, what="The test of two ranks", log=log, env=env, timeout_s=_TIMEOUT_S)
    proofs = [json.loads(line) for line in lines if line.startswith('{"kind"')]
    _say(
        f"Proof: torchrun --nproc-per-node 2, {time.monotonic() - started:.0f} s; weights compared"
        " with one process's"
    )
    for one in proofs:
        is_good = one.get("difference", 1.0) < 1e-5
        text = f"differs by {one['difference']:.0e}" if "difference" in one else one["error"]
        _row(f"{'runs ' if is_good else 'FAILS'}", f"{one['kind']}: {text}")
    if not proofs or any(one.get("difference", 1.0) >= 1e-5 for one in proofs):
        raise EngineError(f"DeepSpeed does not do all of this here. The whole output is in {log}")
    return proofs


def _row(name: str, value: str) -> None:
    _say(f"  {name:<14}{value}")
