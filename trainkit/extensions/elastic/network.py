"""Network: the interfaces on which a job's processes connect.

check_names          all hosts of -H have an address, before anything is started
choose               the driver's: by name, or by the route to the hosts
worker_interface     a worker's: by name, or by the route to the driver
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainkit.errors import ConfigError
from trainkit.launch.network import address_of, interface_of, is_local, own_address

# "1" in a worker's environment: it looks for its interface itself
FINDS_INTERFACE = "TRAINKIT_FINDS_INTERFACE"


@dataclass(frozen=True)
class Network:
    """The network of a job's processes."""

    address: str  # IPv4 address of the rendezvous server
    # network interfaces of workers that do not look for their own; Gloo uses the first, NCCL all
    interfaces: tuple[str, ...]
    # whether the address is unreachable from other hosts; never set for an interface chosen by the
    # user
    is_closed: bool = False


def check_names(hosts: Iterable[str]) -> None:
    """Check that all these hosts' names are known here: ssh would be tried with them until the
    job's time is over.

    Raises:
        ConfigError: a name has no address, and is not an alias of ssh's configuration.
    """
    for host in hosts:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            if not is_local(host) and not _has_alias(host):
                raise ConfigError(
                    f"--hosts names '{host}', of which no address can be looked up here: {error}."
                    " Correct the name, or give the host's address; an alias of ~/.ssh/config is"
                    " legal, too."
                ) from None


def _has_alias(host: str) -> bool:
    """Return whether ssh's configuration leads to a host by another name,
    or through another host.
    """
    if (ssh := shutil.which("ssh")) is None:
        return False
    done = subprocess.run(
        [ssh, "-G", host],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
    )
    known = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    return known.get("hostname", host) != host.lower() or not known.keys().isdisjoint(
        ("proxyjump", "proxycommand")
    )


def choose(hosts: Iterable[str], interfaces: Sequence[str], driver: str | None = None) -> Network:
    """Choose the network for these hosts.

    Args:
        hosts: names; at least one.
        interfaces: the user's choice for the workers, if any.
        driver: the user's choice for the driver's own; None: the first of `interfaces`.

    Raises:
        ConfigError: an interface does not exist, or a host is unreachable.
    """
    if interfaces or driver:
        own = driver or interfaces[0]
        return Network(address_of(own), tuple(interfaces) or (own,))
    remote = [host for host in hosts if not is_local(host)]
    if not remote:
        return Network("127.0.0.1", ("lo",), is_closed=True)
    address = own_address(remote[0])
    return Network(address, (interface_of(address),))


def worker_interface(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker's interface, if it looks for it itself; check that a named
    one is here.

    Args:
        environ: the worker's, as the driver has set it.

    Raises:
        ConfigError: there is none.
    """
    name = environ.get("HOROVOD_GLOO_IFACE")
    if environ.get(FINDS_INTERFACE) != "1":
        if name is not None:
            address_of(name)
        return {}
    name = interface_of(own_address(environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]))
    return {"HOROVOD_GLOO_IFACE": name} | nccl_interface(name, environ)


def nccl_interface(name: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which NCCL takes this interface too, unless the user has set it: on
    some hosts it is another one than Gloo's.
    """
    return {} if "NCCL_SOCKET_IFNAME" in environ else {"NCCL_SOCKET_IFNAME": name}
