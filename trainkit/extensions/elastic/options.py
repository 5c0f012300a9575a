"""Settings of an elastic job, from horovodrun's command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.errors import ConfigError
from trainkit.extensions.elastic.hosts import parse
from trainkit.extensions.elastic.messages import Rules
from trainkit.extensions.elastic.network import FINDS_INTERFACE
from trainkit.extensions.elastic.upstream import chosen_driver
from trainkit.launch.network import DRIVER

_LONGEST_PAUSE_S = 3600


@dataclass(frozen=True)
class Settings:
    """The requested elastic job."""

    rules: Rules
    command: tuple[str, ...]  # the workers' command
    environ: Mapping[str, str]  # environment of all workers, including HOROVOD_* tuning variables
    script: str | None = None  # the host discovery script, or None
    hosts: Mapping[str, int] = field(default_factory=dict)  # slots by host if there is no script
    slots: int | None = None  # slots of hosts that the script prints without a number; None: 1
    # the user's choice for the workers; none: each looks for its own
    interfaces: tuple[str, ...] = ()
    driver_interface: str | None = None  # the user's choice for the driver, if it is another
    ssh_port: int | None = None  # None: ssh's default
    ssh_identity_file: str | None = None  # None: ssh's default
    output: Path | None = None  # folder for the workers' output, or None
    with_time: bool = False  # whether printed lines start with the time
    verbose: bool = False  # whether to print which process is started where
    # whether a script that calls hvd.init() itself ends the job, for Horovod's own driver to take
    # it
    passes_on: bool = False


def settings_of(
    args: argparse.Namespace, environ: Mapping[str, str], typed: Sequence[str] = ()
) -> Settings:
    """Convert horovodrun's parsed arguments; `environ` is its environment plus the variables of its
    tuning options.

    Args:
        typed: the command line, which has the order of interfaces.

    Raises:
        ConfigError: an option is missing, out of range, or not available in an elastic job.
    """
    if getattr(args, "run_func", None) is not None:
        raise ConfigError(
            "horovod.run() of a function has no elastic mode in trainkit; use horovodrun with a"
            " command."
        )
    if getattr(args, "use_mpi", False):
        raise ConfigError(
            "--mpi is given, and --min-np or --host-discovery-script asks for an elastic job, whose"
            " ranks change: MPI's cannot. Leave --mpi out: elastic jobs run on Gloo, also with a"
            " Horovod that has MPI."
        )
    if getattr(args, "start_timeout", None) is not None:
        raise ConfigError(
            f"--start-timeout is {args.start_timeout}, and an elastic job has none. How long it"
            " waits for ranks is --elastic-timeout."
        )
    command = list(args.command or ())
    if command[:1] == ["--"]:
        command.pop(0)
    if not command:
        raise ConfigError(
            "There is no command; write it at the end: -np 2 --min-np 1 python train.py"
        )
    script = args.host_discovery_script
    interfaces = _in_order(args.nics or (), typed)
    of_driver = [name.removeprefix(DRIVER) for name in interfaces if name.startswith(DRIVER)]
    if len(of_driver) > 1:
        raise ConfigError(
            f"--network-interfaces names {' and '.join(of_driver)} for the driver; it listens at"
            " one."
        )
    return Settings(
        rules=_rules(args, environ),
        command=tuple(command),
        environ={name: str(value) for name, value in environ.items()},
        script=script,
        hosts=(
            {}
            if script
            else parse(args.hosts or f"localhost:{args.num_proc}", args.slots, "--hosts")
        ),
        slots=args.slots,
        interfaces=tuple(name for name in interfaces if not name.startswith(DRIVER)),
        driver_interface=of_driver[0] if of_driver else None,
        ssh_port=args.ssh_port,
        ssh_identity_file=args.ssh_identity_file,
        output=Path(args.output_filename) if args.output_filename else None,
        with_time=bool(args.prefix_output_with_timestamp),
        verbose=bool(args.verbose),
        passes_on=chosen_driver(environ) is None,
    )


def _in_order(names: Iterable[str], typed: Sequence[str]) -> list[str]:
    """Return names of interfaces as they were typed: horovodrun's parser makes a set of them."""
    given = [
        word.partition("=")[2] or after
        for word, after in zip(typed, [*typed, ""][1:], strict=True)
        if _names_some(word)
    ]
    order = [name for value in given for name in value.split(",")]
    return sorted(
        names, key=lambda name: (order.index(name) if name in order else len(order), name)
    )


def _names_some(word: str) -> bool:
    return word.partition("=")[0] in ("--network-interface", "--network-interfaces")


def _rules(args: argparse.Namespace, environ: Mapping[str, str]) -> Rules:
    np = args.num_proc
    if np is None or np < 1:
        raise ConfigError(f"-np is {np}; it must be 1 or more: the number of ranks at the start.")
    min_np = np if args.min_num_proc is None else args.min_num_proc
    if not 1 <= min_np <= np:
        raise ConfigError(f"--min-np is {min_np}; it must be from 1 to -np, which is {np}.")
    max_np = args.max_num_proc
    if max_np is not None and max_np < np:
        raise ConfigError(
            f"--max-np is {max_np}; it must be at least -np, which is {np}, or left out for no"
            " limit."
        )
    if args.reset_limit is not None and args.reset_limit < 0:
        raise ConfigError(
            f"--reset-limit is {args.reset_limit}; it must be 0 or more, or left out for no limit."
        )
    if args.slots is not None and args.slots < 1:
        raise ConfigError(f"--slots-per-host is {args.slots}; it must be 1 or more.")
    first, longest = args.cooldown_range or (1, 60)
    if not 1 <= first <= longest <= _LONGEST_PAUSE_S:
        raise ConfigError(
            f"--blacklist-cooldown-range is {first} {longest}; it must be two numbers of seconds"
            f" from 1 to {_LONGEST_PAUSE_S}, the smaller first."
        )
    return Rules(
        np=np,
        min_np=min_np,
        max_np=max_np,
        timeout_s=_timeout(args.elastic_timeout, environ),
        reset_limit=args.reset_limit,
        pause_s=(float(first), float(longest)),
        cools_down=args.cooldown_range is not None,
    )


def _timeout(given: int | None, environ: Mapping[str, str]) -> float:
    if given is not None:
        name = "--elastic-timeout"
        text = str(given)
    else:
        name = "HOROVOD_ELASTIC_TIMEOUT"
        text = environ.get("HOROVOD_ELASTIC_TIMEOUT", "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{name} is '{text}'; it must be a number of seconds above 0.")
    return seconds


def worker_environment(settings: Settings, given: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment: horovodrun's own, without variables of another job, plus
    `given`. NCCL's interface is the user's, if one is set.
    """
    stale = ("HOROVOD_ELASTIC", "HOROVOD_RENDEZVOUS_SCOPE", "TRAINKIT_WORKER", "TRAINKIT_SLOT")
    own = {name: value for name, value in settings.environ.items() if name not in stale}
    added = dict(given) | {FINDS_INTERFACE: "" if settings.interfaces else "1"}
    if "NCCL_SOCKET_IFNAME" in own or not settings.interfaces:  # a worker finds its own
        added.pop("NCCL_SOCKET_IFNAME", None)
    return own | added
