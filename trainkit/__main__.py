"""python -m trainkit <command> [overrides]:
finds the command in cli/commands.py, and passes the rest of the line to it.
"""

from __future__ import annotations

import contextlib
import sys

from trainkit.cli.commands import all_commands, command_of, find_usage
from trainkit.cli.options import with_plain_run
from trainkit.cli.usage import read_in_part
from trainkit.collector import collect_rarely
from trainkit.errors import ConfigError, did_you_mean
from trainkit.extension import broken_note, resolve
from trainkit.launch.slurm.step import hold_signals
from trainkit.openmp import wait_briefly
from trainkit.version import __version__

_USAGE = """usage: python -m trainkit <command> [conf=NAME] [key=value ...]

{commands}

  python -m trainkit fit conf=resnet50                             one process
  horovodrun -np 2 python -m trainkit fit conf=resnet50            two, on Horovod
  torchrun --nproc-per-node 2 -m trainkit fit conf=resnet50        two, on torch.distributed
  python -m trainkit fit conf=resnet50 launcher=ray                two, on a Ray cluster (docs/ray.md)
  python -m trainkit fit conf=resnet50 launcher=slurm              a batch job on Slurm (docs/slurm.md)
  python -m trainkit fit conf=resnet50 --cfg job                   print the config and stop
  python -m trainkit fit -m conf=resnet50 optimizer.lr=0.05,0.1    one run for each value
"""


def main() -> int:
    """Run the command of the command line and return the exit code."""
    hold_signals()
    collect_rarely()
    wait_briefly()
    try:
        return _main(sys.argv[1:])
    except ConfigError as error:  # of the table of commands; each command reports its own
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        with read_in_part():
            print(_usage())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name in ("-V", "--version"):
        with read_in_part():
            print(f"trainkit {__version__}")
        return 0
    command = command_of(name)
    if command is None or " " in name:
        commands = all_commands()
        near = did_you_mean(name, commands)
        print(f"Error: '{name}' is not a command.{near}{broken_note()}", file=sys.stderr)
        print(
            f"Commands: {', '.join(commands)}. What they do: python -m trainkit --help",
            file=sys.stderr,
        )
        return 2
    usage = find_usage(name)
    if usage is not None and usage.takes_run:
        rest = with_plain_run(rest)
    # without a usage the words may be those of another program, as launch's
    asks = usage is not None and {"-h", "--help"} & {*rest}
    with read_in_part() if asks else contextlib.nullcontext():
        code: int = resolve(command.main)(name, rest)
    return code


def _usage() -> str:
    return _USAGE.format(
        commands="\n".join(
            f"  {name:<14}{command.summary}" for name, command in all_commands().items()
        )
    )


if __name__ == "__main__":
    sys.exit(main())
