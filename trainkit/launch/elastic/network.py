"""Network: which host names mean this host, and the interface on which a job's processes connect."""

from __future__ import annotations

import fcntl
import functools
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from trainkit.errors import ConfigError

_SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True)
class Network:
    """The network of a job's processes."""

    address: str  # IPv4 address of the rendezvous server
    interfaces: tuple[str, ...]  # network interfaces; Gloo uses the first, NCCL all
    # whether the address is unreachable from other hosts; never set for an interface chosen by the user
    is_closed: bool = False


@functools.cache
def is_local(host: str) -> bool:
    """Return whether a host's name or address is this host's."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return host == socket.gethostname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))  # binding works only with this host's own addresses
        except OSError:
            return False
    return True


def choose(hosts: Iterable[str], interfaces: Iterable[str] | None) -> Network:
    """Choose the network for these hosts.

    Args:
        hosts: names; at least one.
        interfaces: the user's choice, if any.

    Raises:
        ConfigError: an interface does not exist, or a host is unreachable.
    """
    if interfaces:
        names = tuple(sorted(interfaces))
        return Network(address_of(names[0]), names)
    remote = [host for host in hosts if not is_local(host)]
    if not remote:
        return Network("127.0.0.1", ("lo",), is_closed=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((remote[0], 9))  # sends nothing; makes the system choose a route
        except OSError as error:
            raise ConfigError(_unreachable(remote[0], error)) from None
        address = str(probe.getsockname()[0])
    return Network(address, (_interface_of(address),))


def _unreachable(host: str, error: OSError) -> str:
    """Return the error of a host to which no IPv4 route leads."""
    try:
        (*_, (address, *_)), *_ = socket.getaddrinfo(host, None, socket.AF_INET6)
    except OSError:
        return f"There is no route to host '{host}': {error}. Use names that resolve here, or set --network-interface."
    return (
        f"Host '{host}' has an IPv6 address alone here ({address}). Horovod's ranks connect over IPv4: give it an IPv4 "
        "address, and a name that has one."
    )


def address_of(interface: str) -> str:
    """Return an interface's IPv4 address.

    Raises:
        ConfigError: the interface has none.
    """
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"--network-interface is '{interface}', which has no IPv4 address here ({error.strerror}); interfaces: {known}."
            ) from None


def _interface_of(address: str) -> str:
    for _, name in socket.if_nameindex():
        try:
            if address_of(name) == address:
                return name
        except ConfigError:
            continue
    raise ConfigError(
        f"No interface has the address {address}, by which this host reaches the others; set --network-interface."
    )
