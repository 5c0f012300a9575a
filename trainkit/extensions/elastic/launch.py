"""`python -m trainkit launch`: starts a command on several ranks, under the driver of elastic jobs.

It needs no Horovod: engine=auto is ddp there. The options have horovodrun's names.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.cli.commands import command_of
from trainkit.cli.usage import read_in_part
from trainkit.errors import ConfigError
from trainkit.extensions.elastic.driver import run
from trainkit.extensions.elastic.options import settings_of
from trainkit.launch.environment import LAUNCHED, without_launcher

_ABOUT = """\
Start COMMAND on N ranks, and keep the job running when ranks die, leave or join.

A rank that is lost costs the others a pause, not a restart: they continue in their processes from
the last commit (callbacks=elastic, Trainer(callbacks=[trainkit.Elastic()])), and its slot is filled
again. engine=auto is ddp (torch.distributed over Gloo or NCCL); engine=horovod works too, if
Horovod is installed.
"""
_EXAMPLES = """\
examples:
  python -m trainkit launch -np 4 --min-np 2 -- python -m trainkit fit conf=resnet18 callbacks=elastic
  python -m trainkit launch -np 8 -H node1:4,node2:4 -- python train.py
  python -m trainkit launch -np 4 --min-np 2 --host-discovery-script ./hosts.sh -- python train.py
"""


def main(command: str, arguments: Sequence[str]) -> int:
    """Run the job, and return its exit code: 0, that of the first error, or 75 with a checkpoint.

    Raises:
        ConfigError: an option is missing, or out of range; the command is not a program.
    """
    with read_in_part():
        given = _parser().parse_args(list(arguments))
    if given.hostfile is not None:
        given.hosts = _hosts_in(Path(given.hostfile))
    environ = without_launcher(os.environ) | {LAUNCHED: "1"}
    settings = replace(settings_of(given, environ, arguments), passes_on=False)
    _check_program(settings.command[0])
    code = run(settings)
    assert isinstance(code, int), "no other driver takes the job"
    return code


def _check_program(word: str) -> None:
    """Refuse a script or a command of trainkit in place of the program that runs it."""
    if shutil.which(word) is not None:
        return
    is_script = word.endswith(".py")
    if is_script or command_of(word) is not None:
        before = "python" if is_script else "python -m trainkit"
        raise ConfigError(
            f"'{word}' is not a program. Write the whole command: python -m trainkit launch -np N"
            f" -- {before} {word} ..."
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainkit launch",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s -np N [options] -- COMMAND ...",
    )
    parser.set_defaults(use_mpi=False, run_func=None, nics=None)
    ranks = parser.add_argument_group("ranks")
    _number(ranks, "-np", "--num-proc", "num_proc", "ranks at the start", required=True)
    _number(ranks, "--min-np", "--min-num-proc", "min_num_proc", "fewest ranks later (-np)")
    _number(ranks, "--max-np", "--max-num-proc", "max_num_proc", "most ranks (no limit)")
    _number(ranks, "--reset-limit", None, "reset_limit", "changes of ranks (no limit)")
    _number(ranks, "--elastic-timeout", None, "elastic_timeout", "seconds to wait for ranks (600)")
    ranks.add_argument(
        "--blacklist-cooldown-range",
        dest="cooldown_range",
        nargs=2,
        type=int,
        metavar=("S", "S"),
        help="pause from a slot's first crash on before it is filled again, in s; doubled at each"
        " crash, up to the second number (no pause at the first crash, then 1 60)",
    )
    hosts = parser.add_argument_group("hosts")
    one = hosts.add_mutually_exclusive_group()
    one.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="(localhost:N)")
    one.add_argument("--hostfile", "-hostfile", metavar="FILE", help="lines 'HOST slots=N'")
    one.add_argument(
        "--host-discovery-script", metavar="FILE", help="prints lines HOST:SLOTS, asked each second"
    )
    _number(hosts, "--slots-per-host", None, "slots", "slots of hosts without a number (1)")
    hosts.add_argument(
        "--network-interfaces",
        "--network-interface",
        dest="nics",
        type=lambda text: text.split(","),
        metavar="NAME,...",
        help="(by the route to the other hosts)",
    )
    hosts.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="(ssh's)")
    hosts.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="(ssh's)")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-filename", metavar="FOLDER", help="also write each rank's output there"
    )
    output.add_argument(
        "--prefix-output-with-timestamp", action="store_true", help="begin lines with the time"
    )
    output.add_argument("--verbose", action="store_true", help="print what is started, and where")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _number(
    group: argparse._ArgumentGroup,
    name: str,
    other: str | None,
    dest: str,
    text: str,
    *,
    required: bool = False,
) -> None:
    names = [name] if other is None else [name, other]
    group.add_argument(*names, dest=dest, type=int, metavar="N", help=text, required=required)


def _hosts_in(file: Path) -> str:
    """Return a hostfile's hosts as -H takes them.

    Raises:
        ConfigError: it cannot be read, or a line is not "HOST slots=N".
    """
    try:
        lines = [line.split("#")[0].split() for line in file.read_text().splitlines()]
    except OSError as error:
        raise ConfigError(f"--hostfile {file} cannot be read: {error.strerror}.") from None
    hosts = []
    for parts in filter(None, lines):
        if len(parts) != 2 or not parts[1].startswith("slots="):
            raise ConfigError(
                f"--hostfile {file} has the line '{' '.join(parts)}'; it must be 'HOST slots=N'."
            )
        hosts.append(f"{parts[0]}:{parts[1].removeprefix('slots=')}")
    return ",".join(hosts)
